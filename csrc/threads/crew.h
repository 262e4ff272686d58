// How many of a pool's threads are worth having at the moment. Knows no threads and no clock.
//
// A thread that loses its processor in the middle of a piece stalls everyone who waits for the end
// of the phase, and one that sleeps has to be woken. While that costs the caller more time than one
// of the others saves it, one thread fewer works. After a while one more is tried again, at longer
// and longer intervals as long as that fails.
#pragma once

#include <algorithm>

namespace paceline {

class Crew {
  public:
    explicit Crew(int size) : size_(size), active_(size) {}

    int active() const { return active_; }

    // A phase of `seconds` took place, of whose pieces the caller did `own` and the other threads
    // `others`. For `lost` of the seconds it woke them and waited for them. Returns whether the
    // number of active threads has changed.
    bool observe(double seconds, double lost, int own, int others) {
        // What the others' pieces would have taken the caller. They had no more time than the phase
        // took, however few pieces a caller without a processor did meanwhile.
        const double each = (seconds - lost) / std::max(own, 1);
        const double saved = std::min(each * others, seconds * (active_ - 1));
        seen_ += seconds;
        lost_ += lost;
        saved_ += saved;
        since_change_ += seconds;
        if (active_ > 1 && lost_ * (active_ - 1) > saved_ + LEAST_LOSS) {
            return change(active_ - 1, std::min(pause_ * 2, LONGEST_PAUSE));
        }
        if (active_ < size_ && since_change_ > pause_) {
            return change(active_ + 1, pause_);
        }
        if (seen_ > MEMORY) {
            seen_ /= 2;
            lost_ /= 2;
            saved_ /= 2;
            if (active_ == size_) {
                pause_ = std::max(pause_ / 2, FIRST_PAUSE);
            }
        }
        return false;
    }

  private:
    static constexpr double LEAST_LOSS = 0.002;   // seconds; about half of a time slice
    static constexpr double MEMORY = 0.04;        // seconds after which what was seen counts half
    static constexpr double FIRST_PAUSE = 0.02;   // seconds of phases
    static constexpr double LONGEST_PAUSE = 1.0;

    bool change(int active, double pause) {
        active_ = active;
        pause_ = pause;
        seen_ = lost_ = saved_ = since_change_ = 0;
        return true;
    }

    int size_, active_;
    double seen_ = 0, lost_ = 0, saved_ = 0;  // lately, with this many threads
    double since_change_ = 0;                 // seconds with this many threads
    double pause_ = FIRST_PAUSE;              // until one more is tried
};

}  // namespace paceline
