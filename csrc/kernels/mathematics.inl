// exp, tanh, erf and softplus of 16 lanes, within 2 ulp of the exact value over all of float32,
// softplus within 3, on every level. Pure functions of the lane: no branch looks at another one. NaN
// gives NaN.
//
// The coefficients are minimax fits of the relative error of the whole function, found with the
// Remez exchange at 40 digits on a grid of 1500 points and then rounded to float32.

namespace paceline {
namespace {

// The nearest integer plus 127, in the lowest bits of a float: what a sum with this rounds to.
// Shifted left by 23, those bits are the float that is two to the power of the integer.
constexpr float EXPONENT_MAGIC = 0x1.8p23f + 127.0f;

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2. The upper part of ln 2 has 15 bits, so
// that n times it is exact without a fused multiplication, and so is the first difference.
struct Exponential {
    f32x16 power;          // e^r
    f32x16 n, n_in_magic;  // n plus EXPONENT_MAGIC
};
inline Exponential exponential(f32x16 x) {
    const f32x16 magic = splat(EXPONENT_MAGIC);
    const f32x16 n_in_magic = fma(x, splat(0x1.715476p0f), magic), n = n_in_magic - magic;
    f32x16 r = fma(n, splat(-0x1.62e4p-1f), x);
    r = fma(n, splat(-0x1.7f7d1cp-20f), r);
    // (e^r - 1 - r) / r^2, relative error of e^r 3.1e-9
    f32x16 p = splat(0x1.6a23cap-10f);
    p = fma(p, r, splat(0x1.123a2p-7f));
    p = fma(p, r, splat(0x1.5558f2p-5f));
    p = fma(p, r, splat(0x1.555492p-3f));
    p = fma(p, r, splat(0x1.fffffcp-2f));
    return {fma(r * r, p, r) + splat(1.0f), n, n_in_magic};
}
inline f32x16 power_of_two(f32x16 n_in_magic) {
    return as_float(shift_left<23>(as_int(n_in_magic)));
}

inline f32x16 exp(f32x16 x) {
    // Beyond these the result is 0 or inf, and stays so. The order of operands lets a NaN through.
    const Exponential e = exponential(max(splat(-104.0f), min(splat(89.0f), x)));
    // 2^n as a product of two powers: n = 128 and subnormal results are out of reach of one.
    const f32x16 magic = splat(EXPONENT_MAGIC), half = fma(e.n, splat(0.5f), magic);
    const f32x16 rest = e.n - (half - magic) + magic;
    return e.power * power_of_two(half) * power_of_two(rest);
}

// The same of x <= 0 in fewer steps, but e^-87 of whatever is below -87.
inline f32x16 softmax_weight(f32x16 x) {
    const Exponential e = exponential(max(splat(-87.0f), x));
    return e.power * power_of_two(e.n_in_magic);
}

// An odd polynomial where tanh is close to its argument; 1 - 2 / (e^2|x| + 1) beyond.
inline f32x16 tanh(f32x16 x) {
    const f32x16 size = abs(x), one = splat(1.0f), two = splat(2.0f);
    // (tanh x - x) / x^3 in u = x^2 up to 0.625^2, relative error of tanh x 4.4e-9
    const f32x16 u = x * x;
    f32x16 p = splat(-0x1.75e1dp-8f);
    p = fma(p, u, splat(0x1.52269cp-6f));
    p = fma(p, u, splat(-0x1.b83c5ap-5f));
    p = fma(p, u, splat(0x1.110726p-3f));
    p = fma(p, u, splat(-0x1.555532p-2f));
    const f32x16 small = fma(x * u, p, x);
    const f32x16 large = one - two / (exp(size + size) + one);
    const f32x16 signed_large = select(less(x, zero()), zero() - large, large);
    return select(less(size, splat(0.625f)), small, signed_large);
}

// An odd polynomial where erf is close to a line; 1 - e^q(|x|) beyond, and 1 from 4 on.
inline f32x16 erf(f32x16 x) {
    const f32x16 size = min(splat(4.0f), abs(x));
    // (erf x - x) / x in u = x^2 up to 0.8125^2, relative error of erf x 3.6e-9
    const f32x16 u = x * x;
    f32x16 p = splat(-0x1.53c6ap-11f);
    p = fma(p, u, splat(0x1.4cbb5ap-8f));
    p = fma(p, u, splat(-0x1.b75d5ep-6f));
    p = fma(p, u, splat(0x1.ce272p-4f));
    p = fma(p, u, splat(-0x1.81272ap-2f));
    p = fma(p, u, splat(0x1.06eba8p-3f));
    const f32x16 small = fma(x, p, x);
    // ln(1 - erf |x|) from 0.8125 to 4, relative error of erf x 2.4e-9
    f32x16 q = splat(0x1.b32366p-13f);
    q = fma(q, size, splat(-0x1.9d5ba8p-9f));
    q = fma(q, size, splat(0x1.732f22p-6f));
    q = fma(q, size, splat(-0x1.ad3d16p-4f));
    q = fma(q, size, splat(-0x1.45bfcep-1f));
    q = fma(q, size, splat(-0x1.20d342p+0f));
    q = fma(q, size, splat(-0x1.1b4c88p-14f));
    const f32x16 large = splat(1.0f) - exp(q);
    const f32x16 signed_large = select(less(x, zero()), zero() - large, large);
    return select(less(size, splat(0.8125f)), small, signed_large);
}

// ln(1 + e^x) = max(x, 0) + ln(1 + u) with u = e^-|x|; ln(1 + u) = 2 atanh(s) with s = u / (2 + u).
inline f32x16 softplus(f32x16 x) {
    const f32x16 u = exp(zero() - abs(x));
    const f32x16 s = u / (splat(2.0f) + u), z = s * s;
    // (atanh s - s) / s^3 in z = s^2 up to 1 / 9, relative error of atanh s 7.2e-10
    f32x16 p = splat(0x1.f1aee0p-4f);
    p = fma(p, z, splat(0x1.b6d6a4p-4f));
    p = fma(p, z, splat(0x1.250976p-3f));
    p = fma(p, z, splat(0x1.9996a8p-3f));
    p = fma(p, z, splat(0x1.555558p-2f));
    const f32x16 twice = s + s;
    return max(zero(), x) + fma(twice * z, p, twice);
}

}  // namespace
}  // namespace paceline
