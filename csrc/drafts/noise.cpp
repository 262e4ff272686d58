#include "drafts/noise.h"

#include <cmath>

namespace paceline {
namespace {

constexpr uint64_t kLow = 0xffffffff;
constexpr int kRounds = 10;

// The noise's word of a token: Philox4x32-10 (Salmon et al., SC 2011), as the sampler takes it.
uint32_t word(uint64_t seed, uint32_t position, uint32_t sample, uint32_t token) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t c[4] = {position, token / 4, sample, 0};
    for (int round = 0; round < kRounds; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0],
                                  static_cast<uint32_t>(b & kLow),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1],
                                  static_cast<uint32_t>(a & kLow)};
        c[0] = next[0], c[1] = next[1], c[2] = next[2], c[3] = next[3];
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return c[token % 4];
}

}  // namespace

double TargetNoise::factor(size_t position, uint32_t token) const {
    const uint32_t x = word(seed_, static_cast<uint32_t>(position), sample_, token);
    const double u = (static_cast<double>(x) + 0.5) * 0x1p-32;
    return std::pow(-std::log(u), -weight_);
}

}  // namespace paceline
