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

void round_at_random(float *x, int64_t n, const int32_t *added) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits = (bits + uint32_t(added[i])) & 0xffff0000u;
        std::memcpy(x + i, &bits, 4);
    }
}

// Elements that are stepped alike. `whole`: they fill torch's vectors. A factor of 1 changes no number.
template <bool whole>
void move(const Args &a, double ratio, const float *const *old, float *g, float *const *now, int64_t n, int64_t at) {
    const float *p0 = old[0] + at, *m0 = old[1] + at, *v0 = old[2] + at;  // the same memory as these, or other
    float *p = now[0] + at, *m = now[1] + at, *v = now[2] + at;
    g += at;
    const double lr = a.lr / ratio, wd = a.decay * ratio;
    const float kept = wd != 0.0 && a.adamw ? float(1 - lr * wd) : 1.0f, added = float(wd);
    const float wider = float(ratio), back = float(1.0 / ratio), size = float(-(lr / a.correction1));
    const float beta2 = float(a.beta2), square = float(1 - a.beta2), eps = float(a.eps);
    const float root = float(std::sqrt(a.correction2)), weight = float(1 - a.beta1);
    const bool near = std::fabs(weight) < 0.5f;
    const float share = near ? weight : weight - 1.0f;
    float factor = float(a.scale * ratio);
    if (wd != 0.0 && !a.adamw) {
        for (int64_t i = 0; i < n; i++) g[i] = std::fma(p0[i], added, g[i] * factor);
        factor = 1.0f;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float y = g[i] * factor, x = m0[i] * wider, z = std::fma(share, y - x, near ? x : y);
        const float w = whole ? std::fma(square * y, y, v0[i] * beta2) : std::fma(v0[i], beta2, square * y * y);
        p[i] = p0[i] * kept + size * z / (std::sqrt(w) / root + eps);
        m[i] = z * back;
        v[i] = w;
    }
}

void step(const Args &a, int64_t at, int64_t n, int64_t rest) {
    alignas(64) float lines[3][kPart], g[kPart];
    const void *const before[] = {a.p_old, a.m_old, a.v_old};
    void *const after[] = {a.p, a.m, a.v};
    const float *old[3];
    float *now[3];
    for (int k = 0; k < 3; k++) {  // read and written where it is, if that can be
        const bool narrow = k && a.narrow, here = after[k] == before[k] && !narrow;
        now[k] = here ? static_cast<float *>(after[k]) + at : lines[k];
        old[k] = narrow || (k && a.fresh) ? now[k] : static_cast<const float *>(before[k]) + at;
        if (k && a.fresh && !a.idle)
            std::memset(now[k], 0, 4 * n);
        else if (narrow)
            load(now[k], before[k], at, n, true);
    }
    if (!a.idle) {
        const double ratio = a.ratios ? a.ratios[at / a.each] : 1.0;
        const int64_t full = std::max<int64_t>(0, std::min(n, rest - at));
        load(g, a.gradient, at, n, a.narrow_gradient);
        move<true>(a, ratio, old, g, now, full, 0);
        move<false>(a, ratio, old, g, now, n - full, full);
        if (a.narrow) {
            round_at_random(now[1], n, a.table + (a.m_place + at) % a.period);
            round_at_random(now[2], n, a.table + (a.v_place + at) % a.period);
        }
    }
    const float *const *found = a.idle ? old : now;
    for (int k = 0; k < 3; k++)
        if (now[k] == lines[k] && !(a.idle && after[k] == before[k]))
            store(after[k], found[k], at, n, k && a.narrow, a.stream);
    if (a.out) store(a.out, found[0], at, n, a.narrow_out, a.stream);
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
                step(a, at, n, tile.rest);
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
