// Attention of a KV head over its pages, and what comes before it: norms, RoPE, the KV kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "products.h"

extern "C" {

struct Layer {
    const float *norm, *mlp_norm;  // [hidden]
    const float *q_norm, *k_norm;  // [head_dim] or null
    Matrix qkv, output, gate_up, down;
    uint8_t *keys, *values;   // [pages, page_size, kv_heads, head_dim]
    const float *cos, *sin;   // [positions, head_dim]
    int32_t window;           // tokens that a row sees; 0: all
};

struct Shape {
    int32_t hidden, heads, kv_heads, head_dim, intermediate, page_size, cache_is_bf16;
    float eps, head_eps, scale;
};
}

namespace {

inline float inverse_rms(const float* x, int width, float eps) {
    F squares = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / (float)width + eps);
}

void normalise(const float* x, const float* weight, int width, float eps, float* y) {
    const float scale = inverse_rms(x, width, eps);
    for (int i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

void rotate(float* head, const float* norm, float eps, int dim, const float* cos, const float* sin) {
    if (norm != nullptr) normalise(head, norm, dim, eps, head);
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

void keep(uint8_t* cache, int64_t at, const float* from, int count, bool is_bf16) {
    if (is_bf16)
        for (int i = 0; i < count; i++) ((uint16_t*)cache)[at + i] = to_bf16(from[i]);
    else
        std::memcpy((float*)cache + at, from, count * sizeof(float));
}

constexpr int ATTENDED_ROWS = 8;
#if defined(__AVX512F__)
constexpr int KEYS = 2 * LANES;  // scored at once: as many as registers hold for four rows
constexpr int AT_ONCE = 4;       // vectors of a value, likewise
#else
constexpr int KEYS = LANES;
constexpr int AT_ONCE = 1;
#endif
constexpr int KEYS_AHEAD = 64;  // that are asked for before they are needed

// Rows of a sequence that attend together.
struct Attending {
    int row, count, num_keys;  // the first of `count` rows; the last of them sees all keys
    const int32_t* pages;
    int64_t scores;  // where those of its queries stand: [kv_heads][queries][width()]

    int width() const { return (num_keys + KEYS - 1) / KEYS * KEYS; }
    int end(int row_of_these) const { return num_keys - count + 1 + row_of_these; }
    // The first key that a row sees through a window.
    int start(int row_of_these, int window) const {
        return window > 0 ? std::max(end(row_of_these) - window, 0) : 0;
    }
};

// Where a head's keys, and its values, of some tokens stand in the cache.
inline void find(
    const Shape& shape, const int32_t* pages, int kv_head, int first, int end, int64_t* place
) {
    const int64_t step = (int64_t)shape.kv_heads * shape.head_dim;
    for (int token = first; token < end;) {
        const int page = token / shape.page_size, offset = token % shape.page_size;
        const int some = std::min(shape.page_size - offset, end - token);
        const int64_t at = ((int64_t)pages[page] * shape.page_size + offset) * step;
        for (int i = 0; i < some; i++) *place++ = at + i * step + kv_head * shape.head_dim;
        token += some;
    }
}

template <bool BF16>
inline F from_cache(const uint8_t* cache, int64_t at) {
    return BF16 ? from_bf16(cache + 2 * at) : load((const float*)cache + at);
}

typedef float Octet __attribute__((vector_size(32)));

template <bool BF16>
inline Octet octet_from_cache(const uint8_t* cache, int64_t at) {
    Octet v;
    if constexpr (BF16) {
        typedef uint16_t Narrow __attribute__((vector_size(16)));
        typedef uint32_t Wide __attribute__((vector_size(32)));
        Narrow narrow;
        std::memcpy(&narrow, cache + 2 * at, sizeof narrow);
        v = (Octet)(__builtin_convertvector(narrow, Wide) << 16);
    } else {
        std::memcpy(&v, (const float*)cache + at, sizeof v);
    }
    return v;
}

// Eight numbers of eight keys: from [key][number] to [number][key].
inline void transpose(Octet* rows) {
    Octet pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        const Octet a = rows[i], b = rows[i + 1];
        pairs[i] = shuffled<0, 8, 1, 9, 4, 12, 5, 13>(a, b);
        pairs[i + 1] = shuffled<2, 10, 3, 11, 6, 14, 7, 15>(a, b);
    }
    for (int i = 0; i < 8; i += 4)
        for (int odd = 0; odd < 2; odd++) {
            const Octet a = pairs[i + odd], b = pairs[i + 2 + odd];
            fours[i + 2 * odd] = shuffled<0, 1, 8, 9, 4, 5, 12, 13>(a, b);
            fours[i + 2 * odd + 1] = shuffled<2, 3, 10, 11, 6, 7, 14, 15>(a, b);
        }
    for (int i = 0; i < 4; i++) {
        const Octet a = fours[i], b = fours[i + 4];
        rows[i] = shuffled<0, 1, 2, 3, 8, 9, 10, 11>(a, b);
        rows[i + 4] = shuffled<4, 5, 6, 7, 12, 13, 14, 15>(a, b);
    }
}

// Scores of N query rows against KEYS keys; keys [head_dim][KEYS]
template <int N>
inline void score(const float* const* queries, const float* keys, int dim, float scale, float** to) {
    F acc[N][KEYS / LANES] = {};
    for (int d = 0; d < dim; d++)
#pragma GCC unroll 2
        for (int v = 0; v < KEYS / LANES; v++) {
            const F key = load(keys + d * KEYS + v * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[n][v] += key * splat(queries[n][d]);
        }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
        for (int v = 0; v < KEYS / LANES; v++) store(to[n] + v * LANES, acc[n][v] * splat(scale));
}

// Scores of a KV head's queries against the keys from `first` on, a multiple of KEYS.
template <bool BF16>
void score_keys(
    const Layer& layer, const Shape& shape, const Attending& these, int kv_head, int first,
    const float* queries, int64_t row_stride, float* scores
) {
    const int dim = shape.head_dim, group = shape.heads / shape.kv_heads, width = these.width();
    const int some = std::min(KEYS, these.num_keys - first);
    if (first + KEYS <= these.start(0, layer.window)) return;
    int64_t place[KEYS], ahead[KEYS];
    const int next = std::min(first + KEYS_AHEAD, these.num_keys);
    const int last = std::min(next + KEYS, these.num_keys);
    find(shape, these.pages, kv_head, first, first + some, place);
    find(shape, these.pages, kv_head, next, last, ahead);
    auto fetch = [&](const uint8_t* cache, const int64_t* places, int count) {
        const int bytes = BF16 ? 2 : 4;
        for (int j = 0; j < count; j++)
            for (int i = 0; i < bytes * dim; i += 64)
                __builtin_prefetch(cache + bytes * places[j] + i, 0, 2);
    };
    fetch(layer.keys, ahead, last - next);
    fetch(layer.values, place, some);
    thread_local std::vector<float> scratch;
    if (scratch.size() < (size_t)dim * KEYS) scratch.resize((size_t)dim * KEYS);
    float* keys = scratch.data();  // [dim][KEYS]
    for (int j = 0; j < KEYS; j += 8)
        for (int d = 0; d < dim; d += 8) {
            Octet rows[8] = {};
            for (int i = 0; i < 8 && j + i < some; i++)
                rows[i] = octet_from_cache<BF16>(layer.keys, place[j + i] + d);
            transpose(rows);
            for (int i = 0; i < 8; i++)
                std::memcpy(keys + (d + i) * KEYS + j, &rows[i], sizeof rows[i]);
        }
    const int num_queries = these.count * group;
    for (int q = 0; q < num_queries; q += 4) {
        const float* from[4];
        float* to[4];
        const int together = std::min(num_queries - q, 4);
        for (int n = 0; n < together; n++) {
            from[n] = queries + (q + n) / group * row_stride + (q + n) % group * dim;
            to[n] = scores + (int64_t)(q + n) * width + first;
        }
        switch (together) {
            case 4: score<4>(from, keys, dim, shape.scale, to); break;
            case 3: score<3>(from, keys, dim, shape.scale, to); break;
            case 2: score<2>(from, keys, dim, shape.scale, to); break;
            default: score<1>(from, keys, dim, shape.scale, to);
        }
    }
}

// Weights from scores; a row sees the keys from `start` to `stop`.
inline void softmax(float* scores, int start, int stop) {
    const int first = start / LANES * LANES, width = (stop + LANES - 1) / LANES * LANES;
    for (int j = first; j < start; j++) scores[j] = -INFINITY;
    for (int j = stop; j < width; j++) scores[j] = -INFINITY;
    F highest = splat(-INFINITY);
    for (int j = first; j < width; j += LANES) {
        const F v = load(scores + j);
        highest = select(v > highest, v, highest);
    }
    const float most = ::highest(highest);
    F total = {};
    for (int j = first; j < width; j += LANES) {
        const F p = exponential(load(scores + j) - splat(most));
        store(scores + j, p);
        total += p;
    }
    const float scale = 1.0f / sum(total);
    for (int j = first; j < width; j += LANES)
        store(scores + j, load(scores + j) * splat(scale));
}

struct Seen {
    const float* weights;  // of keys
    int start, stop;       // the keys that a query row sees; others may hold anything
    float* out;
};

// Values, by the weights that N query rows give them.
template <int N, class VALUE>
inline void mix(const Seen* rows, int dim, VALUE value) {
    int starts[2] = {rows[0].start, rows[0].start}, stops[2] = {rows[0].stop, rows[0].stop};
    for (int n = 1; n < N; n++) {
        starts[0] = std::min(starts[0], rows[n].start);
        starts[1] = std::max(starts[1], rows[n].start);
        stops[0] = std::min(stops[0], rows[n].stop);
        stops[1] = std::max(stops[1], rows[n].stop);
    }
    const int all_see = std::min(starts[1], stops[0]);
    for (int d = 0; d < dim; d += AT_ONCE * LANES) {
        const int vectors = std::min((dim - d) / LANES, AT_ONCE);
        F acc[N][AT_ONCE] = {};
        auto add = [&](int count, int begin, int end, bool by_all) {
            for (int j = begin; j < end; j++)
#pragma GCC unroll 4
                for (int v = 0; v < count; v++) {
                    const F values = value(j, d + v * LANES);
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++)
                        if (by_all || (j >= rows[n].start && j < rows[n].stop))
                            acc[n][v] += splat(rows[n].weights[j]) * values;
                }
        };
        add(vectors, starts[0], all_see, false);
        if (vectors == AT_ONCE)
            add(AT_ONCE, all_see, stops[0], true);
        else
            add(vectors, all_see, stops[0], true);
        add(vectors, stops[0], stops[1], false);
        for (int n = 0; n < N; n++)
            for (int v = 0; v < vectors; v++) store(rows[n].out + d + v * LANES, acc[n][v]);
    }
}

// Up to four queries of a KV head, from their scores. out [rows of these][out_stride]
template <bool BF16>
void attend(
    const Layer& layer, const Shape& shape, const Attending& these, int kv_head, int query,
    int count, float* scores, float* out, int64_t out_stride
) {
    const int dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    thread_local std::vector<int64_t> places;
    places.resize(these.num_keys);
    const int begin = these.start(query / group, layer.window);
    find(shape, these.pages, kv_head, begin, these.num_keys, places.data() + begin);
    Seen seen[4];
    for (int n = 0; n < count; n++) {
        const int row = (query + n) / group, head = (query + n) % group;
        float* weights = scores + (int64_t)(query + n) * these.width();
        const int start = these.start(row, layer.window), stop = these.end(row);
        softmax(weights, start, stop);
        seen[n] = {weights, start, stop, out + row * out_stride + head * dim};
    }
    const int64_t* place = places.data();
    auto value = [&](int j, int d) { return from_cache<BF16>(layer.values, place[j] + d); };
    switch (count) {
        case 4: mix<4>(seen, dim, value); break;
        case 3: mix<3>(seen, dim, value); break;
        case 2: mix<2>(seen, dim, value); break;
        default: mix<1>(seen, dim, value);
    }
}

}  // namespace
