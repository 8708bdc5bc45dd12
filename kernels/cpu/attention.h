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

template <bool BF16>
inline F from_cache(const uint8_t* cache, int64_t at) {
    return BF16 ? from_bf16(cache + 2 * at) : load((const float*)cache + at);
}

// Scores of four query rows against 16 keys; keys [head_dim][16]
template <int N>
inline void score(const float* const* queries, const float* keys, int dim, float scale, float** to) {
    F acc[N] = {};
    for (int d = 0; d < dim; d++) {
        const F key = load(keys + d * LANES);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[n] += key * splat(queries[n][d]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(to[n], acc[n] * splat(scale));
}

struct Seen {
    const float* weights;  // of keys
    int start, stop;       // the keys that a query row sees; others may hold anything
    float* out;
};

#if defined(__AVX512F__)
constexpr int AT_ONCE = 4;  // vectors of a value: as many as registers hold for four rows
#else
constexpr int AT_ONCE = 1;
#endif

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

template <bool BF16>
void attend(
    const Layer& layer, const Shape& shape, const int32_t* pages, const float* queries,
    int64_t row_stride, int count, int num_keys, int kv_head, float* out, int64_t out_stride
) {
    const int dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    const int num_queries = count * group;
    const int fewest = num_keys - count + 1;  // keys of the first row
    const int begin = layer.window > 0 && fewest > layer.window
                          ? (fewest - layer.window) / LANES * LANES
                          : 0;
    const int width = (num_keys - begin + LANES - 1) / LANES * LANES;
    thread_local std::vector<float> scratch;
    const size_t needed = (size_t)num_queries * width + (size_t)dim * LANES;
    if (scratch.size() < needed) scratch.resize(needed);
    float* scores = scratch.data();  // [num_queries][width]
    float* keys = scores + (size_t)num_queries * width;  // [dim][LANES]
    thread_local std::vector<int64_t> places;  // of keys and values, from `begin` on
    places.clear();
    for (int token = begin; token < num_keys; token++) {
        const int64_t page = pages[token / shape.page_size];
        const int64_t at = page * shape.page_size + token % shape.page_size;
        places.push_back((at * shape.kv_heads + kv_head) * dim);
    }
    const int64_t* place = places.data();
    for (int first = begin; first < num_keys; first += LANES) {
        const int some = num_keys - first < LANES ? num_keys - first : LANES;
        for (int j = 0; j < some; j++) {
            const int64_t at = place[first - begin + j];
            for (int d = 0; d < dim; d += LANES) {
                float lanes[LANES];
                store(lanes, from_cache<BF16>(layer.keys, at + d));
                for (int i = 0; i < LANES; i++) keys[(d + i) * LANES + j] = lanes[i];
            }
        }
        for (int j = some; j < LANES; j++)
            for (int d = 0; d < dim; d++) keys[d * LANES + j] = 0.0f;
        for (int q = 0; q < num_queries; q += 4) {
            const float* from[4];
            float* to[4];
            const int these = num_queries - q < 4 ? num_queries - q : 4;
            for (int n = 0; n < these; n++) {
                from[n] = queries + (q + n) / group * row_stride + (q + n) % group * dim;
                to[n] = scores + (size_t)(q + n) * width + (first - begin);
            }
            switch (these) {
                case 4: score<4>(from, keys, dim, shape.scale, to); break;
                case 3: score<3>(from, keys, dim, shape.scale, to); break;
                case 2: score<2>(from, keys, dim, shape.scale, to); break;
                default: score<1>(from, keys, dim, shape.scale, to);
            }
        }
    }
    for (int q = 0; q < num_queries; q++) {
        float* of_row = scores + (size_t)q * width;
        const int end = fewest + q / group;  // keys that this row sees
        int start = layer.window > 0 && end > layer.window ? end - layer.window : 0;
        start -= begin;
        const int stop = end - begin;
        for (int j = 0; j < start; j++) of_row[j] = -INFINITY;
        for (int j = stop; j < width; j++) of_row[j] = -INFINITY;
        F highest = splat(-INFINITY);
        for (int j = 0; j < width; j += LANES) {
            const F v = load(of_row + j);
            highest = select(v > highest, v, highest);
        }
        float most = highest[0];
        for (int i = 1; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
        // Summed from the block that the row's first key stands in, whoever came with it.
        F total = {};
        for (int j = 0; j < width; j += LANES) {
            const F p = exponential(load(of_row + j) - splat(most));
            store(of_row + j, p);
            total += p;
        }
        const float scale = 1.0f / sum(total);
        for (int j = 0; j < width; j += LANES)
            store(of_row + j, load(of_row + j) * splat(scale));
    }
    auto value = [&](int j, int d) { return from_cache<BF16>(layer.values, place[j] + d); };
    for (int q = 0; q < num_queries; q += 4) {
        const int these = num_queries - q < 4 ? num_queries - q : 4;
        Seen seen[4];
        for (int n = 0; n < these; n++) {
            const int row = (q + n) / group, end = fewest + row;
            const int start = layer.window > 0 && end > layer.window ? end - layer.window : 0;
            float* to = out + row * out_stride + (q + n) % group * dim;
            seen[n] = {scores + (size_t)(q + n) * width, std::max(start - begin, 0), end - begin, to};
        }
        switch (these) {
            case 4: mix<4>(seen, dim, value); break;
            case 3: mix<3>(seen, dim, value); break;
            case 2: mix<2>(seen, dim, value); break;
            default: mix<1>(seen, dim, value);
        }
    }
}

}  // namespace
