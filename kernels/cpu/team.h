// Threads that share the stages of a call, and wait for each other between them.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Awake at first; then whoever else wants the core gets it, perhaps the thread that is waited for.
template <class DONE>
inline void wait_until(DONE done) {
    for (int i = 0; !done(); i++) {
        if (i < 2000)
            relax();
        else
            sched_yield();
    }
}

class Team;
using Work = void (*)(void*, Team&);

constexpr int MOST_THREADS = 255;
inline thread_local int own_place = 0;  // of this thread in its team

class Team {
public:
    // Run work(argument, team) on so many threads, this one among them.
    void run(int threads, Work work, void* argument) {
        std::lock_guard<std::mutex> lock(mutex_);
        threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
        while (workers_ < threads - 1) {
            workers_++;
            std::thread(&Team::live, this, workers_, round_.load()).detach();
        }
        size_ = threads;
        work_ = work;
        argument_ = argument;
        for (int i = 0; i < threads; i++) next_[i].taken.store(0);
        left_.store(threads);
        if (threads > 1) {
            // Who takes part stands in the number itself: nobody else may read the rest.
            const uint32_t number = round_.load() / (MOST_THREADS + 1) + 1;
            round_.store(number * (MOST_THREADS + 1) + threads, std::memory_order_release);
            round_.notify_all();
        }
        work(argument, *this);
        left_.fetch_sub(1);
        wait_until([&] { return left_.load(std::memory_order_acquire) == 0; });
    }

    // Tasks of this stage. A thread takes its own, one after the other, and then what is left to
    // others, so that a thread that was held up holds up none; returns when all of them are done.
    template <class TASK>
    void share(int tasks, TASK task) {
        if (size_ == 1) {
            for (int i = 0; i < tasks; i++) task(i);
            return;
        }
        for (int other = 0; other < size_; other++) {
            const int place = (own_place + other) % size_;
            const int first = (int)((int64_t)tasks * place / size_);
            const int count = (int)((int64_t)tasks * (place + 1) / size_) - first;
            std::atomic<int>& taken = next_[place].taken;
            for (int i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < count;)
                task(first + i);
        }
        uint32_t stage = stage_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            for (int i = 0; i < size_; i++) next_[i].taken.store(0, std::memory_order_relaxed);
            stage_.store(stage + 1, std::memory_order_release);
        } else {
            wait_until([&] { return stage_.load(std::memory_order_acquire) != stage; });
        }
    }

private:
    void live(int thread, uint32_t seen) {
        own_place = thread;
        for (;;) {
            for (int i = 0; i < 4000 && round_.load(std::memory_order_acquire) == seen; i++) relax();
            round_.wait(seen, std::memory_order_acquire);
            seen = round_.load(std::memory_order_acquire);
            if (thread < (int)(seen % (MOST_THREADS + 1))) {
                work_(argument_, *this);
                left_.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    std::mutex mutex_;
    int workers_ = 0, size_ = 1;
    Work work_ = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> left_{0};
    struct alignas(64) Taken {
        std::atomic<int> taken{0};
    };
    Taken next_[MOST_THREADS];
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> stage_{0};
};

Team& the_team() {
    static Team* team = new Team;  // never destroyed: its threads outlive main
    return *team;
}

template <class BODY>
void on_team(int threads, BODY body) {
    auto call = [](void* given, Team& team) { (*static_cast<BODY*>(given))(team); };
    the_team().run(threads, call, &body);
}

}  // namespace
