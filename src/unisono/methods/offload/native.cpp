// Steps of Adam and AdamW over lines of numbers: what torch's fused kernel computes, bit by bit, in one pass over the
// memory, on threads of its own that take no lock of Python's. Compiled at the first use by `native.py`.

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

extern "C" {

struct Args {                                // as in native.py
    const void *p_old, *m_old, *v_old;       // float; m and v may be bfloat16
    void *p, *m, *v;                         // where they are written: there too, or elsewhere
    const void *gradient;                    // float or bfloat16
    void *out;                               // the new values, float or bfloat16; or null
    const int64_t *spans;                    // start, stop, start, stop, ...
    const float *ratios;                     // one for every `each` elements, or null
    const int32_t *table;                    // random numbers, twice in a row: to round m and v
    int64_t span_count, each, period, m_place, v_place, width;
    double lr, decay, beta1, beta2, eps, correction1, correction2, scale;
    int32_t adamw, fresh, idle, narrow, narrow_gradient, narrow_out, stream;
};

}  // extern "C"

namespace {

constexpr int64_t kTile = 1 << 16, kPart = 512;  // elements that a thread takes, and that stay in its innermost cache

struct Tile {
    int64_t start, stop, rest;  // from `rest` on the elements of a span do not fill one of torch's vectors
};

struct Job {
    Args a;
    std::vector<Tile> tiles;
    size_t next = 0, left = 0;
};

inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline float widen(float x) { return x; }

inline uint16_t nearest(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return x != x ? uint16_t(0x7fc0) : uint16_t(rounded);
}

void load(float *to, const void *from, int64_t at, int64_t n, bool narrow) {
    if (narrow)
        for (int64_t i = 0; i < n; i++) to[i] = widen(static_cast<const uint16_t *>(from)[at + i]);
    else
        std::memcpy(to, static_cast<const float *>(from) + at, 4 * n);
}

void put(void *to, const void *from, int64_t at, int64_t n, int64_t size, bool stream) {
    char *target = static_cast<char *>(to) + at * size;
#ifdef __SSE2__
    if (stream && (reinterpret_cast<uintptr_t>(target) & 15) == 0 && (n * size) % 16 == 0) {
        for (int64_t i = 0; i < n * size; i += 16)  // past the caches: the lines need not be read first
            _mm_stream_si128(reinterpret_cast<__m128i *>(target + i),
                             _mm_loadu_si128(reinterpret_cast<const __m128i *>(static_cast<const char *>(from) + i)));
        return;
    }
#endif
    std::memcpy(target, from, n * size);
}

void store(void *to, const float *from, int64_t at, int64_t n, bool narrow, bool stream) {
    if (!narrow) {
        put(to, from, at, n, 4, stream);
        return;
    }
    alignas(64) uint16_t half[kPart];
    for (int64_t i = 0; i < n; i++) half[i] = nearest(from[i]);
    put(to, half, at, n, 2, stream);
}

template <typename T>
inline T narrow_at_random(float x, int32_t added) {  // in 32 bits as it is
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return sizeof(T) == 4 ? T(x) : T((bits + uint32_t(added)) >> 16);
}

template <typename T>
struct Part {  // before, after (the same memory, or other), and what is added to round m and v
    const float *p0;
    const T *m0, *v0;
    float *g, *p;
    T *m, *v;
    const int32_t *m_added, *v_added;
};

// Elements that are stepped alike. `whole`: they fill torch's vectors. A factor of 1 changes no number. Moments of 16
// bits are cast in the same loop: with loops of their own they took longer than moments of 32.
template <bool whole, typename T>
void move(const Args &a, double ratio, const Part<T> &of, int64_t start, int64_t stop) {
    const auto [p0, m0, v0, g, p, m, v, m_added, v_added] = of;
    const double lr = a.lr / ratio, wd = a.decay * ratio;
    const float kept = wd != 0.0 && a.adamw ? float(1 - lr * wd) : 1.0f, added = float(wd);
    const float wider = float(ratio), back = float(1.0 / ratio), size = float(-(lr / a.correction1));
    const float beta2 = float(a.beta2), square = float(1 - a.beta2), eps = float(a.eps);
    const float root = float(std::sqrt(a.correction2)), weight = float(1 - a.beta1);
    const bool near = std::fabs(weight) < 0.5f;
    const float share = near ? weight : weight - 1.0f;
    float factor = float(a.scale * ratio);
    if (wd != 0.0 && !a.adamw) {
        for (int64_t i = start; i < stop; i++) g[i] = std::fma(p0[i], added, g[i] * factor);
        factor = 1.0f;
    }
#pragma omp simd
    for (int64_t i = start; i < stop; i++) {
        const float y = g[i] * factor, x = widen(m0[i]) * wider, z = std::fma(share, y - x, near ? x : y);
        const float u = widen(v0[i]);
        const float w = whole ? std::fma(square * y, y, u * beta2) : std::fma(u, beta2, square * y * y);
        p[i] = p0[i] * kept + size * z / (std::sqrt(w) / root + eps);
        m[i] = narrow_at_random<T>(z * back, m_added[i]);
        v[i] = narrow_at_random<T>(w, v_added[i]);
    }
}

template <typename T>
void step(const Args &a, int64_t at, int64_t n, int64_t rest) {
    alignas(64) float g[kPart], values[kPart];
    alignas(64) T moments[2][kPart];
    const bool here = a.p == a.p_old;  // written where it is read
    Part<T> of{static_cast<const float *>(a.p_old) + at, static_cast<const T *>(a.m_old) + at,
               static_cast<const T *>(a.v_old) + at, g, values, moments[0], moments[1],
               a.table + (a.m_place + at) % a.period, a.table + (a.v_place + at) % a.period};
    if (here) {
        of.p = static_cast<float *>(a.p) + at;
        of.m = static_cast<T *>(a.m) + at, of.v = static_cast<T *>(a.v) + at;
    }
    if (!a.idle) {
        const double ratio = a.ratios ? a.ratios[at / a.each] : 1.0;
        const int64_t full = std::max<int64_t>(0, std::min(n, rest - at));
        if (a.fresh) {
            std::memset(of.m, 0, sizeof(T) * n), std::memset(of.v, 0, sizeof(T) * n);
            of.m0 = of.m, of.v0 = of.v;
        }
        load(g, a.gradient, at, n, a.narrow_gradient);
        move<true>(a, ratio, of, 0, full);
        move<false>(a, ratio, of, full, n);
    }
    if (!here) {
        put(a.p, a.idle ? of.p0 : of.p, at, n, 4, a.stream);
        put(a.m, a.idle ? of.m0 : of.m, at, n, sizeof(T), a.stream);
        put(a.v, a.idle ? of.v0 : of.v, at, n, sizeof(T), a.stream);
    }
    if (a.out) store(a.out, a.idle ? of.p0 : of.p, at, n, a.narrow_out, a.stream);
}

struct Pool {
    std::mutex mutex;
    std::condition_variable work, done;
    std::deque<Job *> jobs;
    std::vector<std::thread> threads;
    bool closing = false;

    void loop() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            work.wait(lock, [&] { return closing || !jobs.empty(); });
            if (jobs.empty()) return;
            Job *job = jobs.front();
            Tile tile = job->tiles[job->next++];
            if (job->next == job->tiles.size()) jobs.pop_front();
            lock.unlock();
            const Args &a = job->a;
            for (int64_t at = tile.start; at < tile.stop;) {
                int64_t n = std::min(kPart, tile.stop - at);
                if (a.ratios) n = std::min(n, (at / a.each + 1) * a.each - at);
                a.narrow ? step<uint16_t>(a, at, n, tile.rest) : step<float>(a, at, n, tile.rest);
                at += n;
            }
#ifdef __SSE2__
            _mm_sfence();
#endif
            lock.lock();
            if (--job->left == 0) done.notify_all();
        }
    }
};

}  // namespace

extern "C" {

void *pool_open(int count) try {  // null: no thread can be started
    std::unique_ptr<Pool> pool(new Pool);
    pool->threads.reserve(count);
    try {
        for (int i = 0; i < count; i++) pool->threads.emplace_back([given = pool.get()] { given->loop(); });
    } catch (...) {  // fewer will do
        if (pool->threads.empty()) throw;
    }
    return pool.release();
} catch (...) {
    return nullptr;
}

void pool_close(void *given) {  // its few bytes stay: somebody may wait for a job, or come too late with one
    Pool *pool = static_cast<Pool *>(given);
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        pool->closing = true;
    }
    pool->work.notify_all();
    for (auto &thread : pool->threads) thread.join();
}

void *job_start(void *given, const Args *args) try {  // null: the pool is closed, or there is no memory
    Pool *pool = static_cast<Pool *>(given);
    std::unique_ptr<Job> job(new Job{*args, {}});
    for (int64_t k = 0; k < args->span_count; k++) {
        const int64_t start = args->spans[2 * k], stop = args->spans[2 * k + 1];
        const int64_t rest = stop - (stop - start) % args->width;
        for (int64_t at = start; at < stop;) {
            int64_t end = std::min((at / kTile + 1) * kTile, stop);
            job->tiles.push_back({at, end, rest});
            at = end;
        }
    }
    job->left = job->tiles.size();
    if (job->left) {
        std::lock_guard<std::mutex> lock(pool->mutex);
        if (pool->closing) return nullptr;
        pool->jobs.push_back(job.get());
    }
    pool->work.notify_all();
    return job.release();
} catch (...) {
    return nullptr;
}

void job_wait(void *given, void *one) {
    Pool *pool = static_cast<Pool *>(given);
    Job *job = static_cast<Job *>(one);
    {
        std::unique_lock<std::mutex> lock(pool->mutex);
        pool->done.wait(lock, [&] { return job->left == 0; });
    }
    delete job;
}

}  // extern "C"
