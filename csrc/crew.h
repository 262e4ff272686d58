// How many of a pool's threads are worth having at the moment. Knows no threads and no clock.
//
// A thread that loses its processor in the middle of a piece stalls everyone who waits for the end
// of the phase. Without one of n threads, the work of one would fall to the n - 1 others: it brings
// the time worked divided by n - 1. While stalls cost more than that, one thread fewer works. After
// a while one more is tried again, at longer and longer intervals as long as that fails.
#pragma once

#include <algorithm>

namespace paceline {

class Crew {
  public:
    explicit Crew(int size) : size_(size), active_(size) {}

    int active() const { return active_; }

    // A phase of `seconds` took place, for the last `stalled` of which the caller waited beyond the
    // usual. Returns whether the number of active threads has changed.
    bool observe(double seconds, double stalled) {
        worked_ += seconds - stalled;
        stalled_ += stalled;
        rested_ += seconds;
        if (active_ > 1 && stalled_ * (active_ - 1) > worked_ + LEAST_STALL) {
            return change(active_ - 1, std::min(pause_ * 2, LONGEST_PAUSE));
        }
        if (active_ < size_ && rested_ > pause_) {
            return change(active_ + 1, pause_);
        }
        if (worked_ + stalled_ > MEMORY) {
            worked_ /= 2;
            stalled_ /= 2;
            if (active_ == size_) {
                pause_ = std::max(pause_ / 2, FIRST_PAUSE);
            }
        }
        return false;
    }

  private:
    static constexpr double LEAST_STALL = 0.002;   // seconds; about half of a time slice
    static constexpr double MEMORY = 0.04;         // seconds after which what was seen counts half
    static constexpr double FIRST_PAUSE = 0.02;    // seconds of phases
    static constexpr double LONGEST_PAUSE = 1.0;

    bool change(int active, double pause) {
        active_ = active;
        pause_ = pause;
        worked_ = stalled_ = rested_ = 0;
        return true;
    }

    int size_, active_;
    double worked_ = 0, stalled_ = 0;  // lately, with this many threads
    double rested_ = 0;                // since their number last changed
    double pause_ = FIRST_PAUSE;       // until one more is tried
};

}  // namespace paceline
