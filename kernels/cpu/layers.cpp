// Whole layers of a decoder in one call, for a CPU. kernels/cpu/layers.py says what they compute
// and calls them; compiled once for each instruction set (pyproject.toml), by whoever installs.
//
// A row comes out the same to the bit in any company and with any number of threads: every output
// is summed by one thread, over the inputs in order; blocks of attention stand at fixed positions.

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

struct Batch {
    int32_t rows, sequences;
    const int64_t *first_rows, *lengths, *slots;  // [sequences + 1], [sequences], [sequences]
    const int64_t* places;                        // [rows], page * page_size + offset
    const int64_t* positions;                     // [rows]
    const int32_t* block_table;
    int64_t block_table_stride;
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

// Rows of one sequence, the last `count` of those up to its row `last`, in one KV head.
struct Attended {
    const float* queries;  // [rows][row_stride], of the first query head of this KV head
    int64_t row_stride;
    int count, num_keys;   // of the last of these rows
};

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

struct Buffers {
    std::vector<float> normed, qkv, attended, gated;
    std::vector<Inputs> inputs;  // of the widest product
};

void layers(
    Team& team, const Layer* all, int count, const Shape& shape, const Batch& batch, float* x,
    Buffers& buffers
) {
    const int rows = batch.rows, hidden = shape.hidden, dim = shape.head_dim;
    const int group = shape.heads / shape.kv_heads;
    const int64_t width = (int64_t)(shape.heads + 2 * shape.kv_heads) * dim;
    const int64_t attended_width = (int64_t)shape.heads * dim;
    float* normed = buffers.normed.data();
    float* qkv = buffers.qkv.data();
    float* attended = buffers.attended.data();
    float* middle = buffers.gated.data();
    auto of = [&](const float* values) { return Rows{values, rows, buffers.inputs}; };
    // (sequence, its first row) of each block of rows that attend together
    std::vector<std::pair<int, int>> blocks;
    for (int s = 0; s < batch.sequences; s++)
        for (int64_t row = batch.first_rows[s]; row < batch.first_rows[s + 1]; row += ATTENDED_ROWS)
            blocks.push_back({s, (int)row});
    const int num_rows_of_sequences = (int)batch.first_rows[batch.sequences];
    for (int l = 0; l < count; l++) {
        const Layer& layer = all[l];
        team.share(rows, [&](int row) {
            const int64_t at = (int64_t)row * hidden;
            normalise(x + at, layer.norm, hidden, shape.eps, normed + at);
        });
        product<false>(team, layer.qkv, of(normed), qkv);
        team.share(rows, [&](int row) {
            float* of_row = qkv + row * width;
            const float* cos = layer.cos + batch.positions[row] * dim;
            const float* sin = layer.sin + batch.positions[row] * dim;
            for (int h = 0; h < shape.heads + shape.kv_heads; h++) {
                const float* norm = h < shape.heads ? layer.q_norm : layer.k_norm;
                rotate(of_row + h * dim, norm, shape.head_eps, dim, cos, sin);
            }
            const int64_t kv_width = (int64_t)shape.kv_heads * dim;
            const int64_t at = batch.places[row] * kv_width;
            const float* keys = of_row + shape.heads * dim;
            keep(layer.keys, at, keys, (int)kv_width, shape.cache_is_bf16);
            keep(layer.values, at, keys + kv_width, (int)kv_width, shape.cache_is_bf16);
            if (row >= num_rows_of_sequences)  // padding
                std::memset(attended + row * attended_width, 0, attended_width * sizeof(float));
        });
        team.share((int)blocks.size() * shape.kv_heads, [&](int task) {
            const auto [s, row] = blocks[task / shape.kv_heads];
            const int kv_head = task % shape.kv_heads;
            const int behind = (int)batch.first_rows[s + 1] - row;  // rows from here on
            const int these = behind < ATTENDED_ROWS ? behind : ATTENDED_ROWS;
            const int num_keys = (int)batch.lengths[s] - behind + these;
            const int32_t* pages = batch.block_table + batch.slots[s] * batch.block_table_stride;
            const float* queries = qkv + row * width + kv_head * group * dim;
            float* out = attended + row * attended_width + kv_head * group * dim;
            auto how = shape.cache_is_bf16 ? attend<true> : attend<false>;
            how(layer, shape, pages, queries, width, these, num_keys, kv_head, out, attended_width);
        });
        product<true>(team, layer.output, of(attended), x);
        team.share(rows, [&](int row) {
            const int64_t at = (int64_t)row * hidden;
            normalise(x + at, layer.mlp_norm, hidden, shape.eps, normed + at);
        });
        gated(team, layer.gate_up, of(normed), middle);
        product<true>(team, layer.down, of(middle), x);
    }
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void outrider_layers(
    const Layer* all, int32_t count, const Shape* shape, const Batch* batch, float* x,
    int32_t threads
) {
    thread_local Buffers buffers;
    const size_t rows = (size_t)batch->rows;
    auto reserve = [&](auto& buffer, size_t width) {
        if (buffer.size() < rows * width) buffer.resize(rows * width);
    };
    reserve(buffers.normed, shape->hidden);
    reserve(buffers.qkv, (size_t)(shape->heads + 2 * shape->kv_heads) * shape->head_dim);
    reserve(buffers.attended, (size_t)shape->heads * shape->head_dim);
    reserve(buffers.gated, shape->intermediate);
    const int attended_width = shape->heads * shape->head_dim;
    const int widest = std::max({shape->hidden, attended_width, shape->intermediate});
    if (IN_INTEGERS) reserve(buffers.inputs, widest / BLOCK);
    Buffers& mine = buffers;
    on_team(threads, [&](Team& team) { layers(team, all, count, *shape, *batch, x, mine); });
}

__attribute__((visibility("default"))) void outrider_product(
    const Matrix* matrix, const float* x, int32_t rows, float* y, int32_t threads
) {
    thread_local std::vector<Inputs> buffer;
    std::vector<Inputs>& inputs = buffer;
    const size_t needed = (size_t)rows * (matrix->k / BLOCK);
    if (IN_INTEGERS && inputs.size() < needed) inputs.resize(needed);
    on_team(threads, [&](Team& team) { product<false>(team, *matrix, {x, rows, inputs}, y); });
}

__attribute__((visibility("default"))) void outrider_rows(
    const Matrix* matrix, const int64_t* rows, int32_t count, float* y
) {
    const Product& format = PRODUCTS[matrix->format];
    const int64_t tile_bytes = (int64_t)format.block_bytes * (matrix->k / BLOCK);
    for (int i = 0; i < count; i++, y += matrix->k)
        format.unpacked_row(
            matrix->data + rows[i] / TILE * tile_bytes, matrix->k, (int)(rows[i] % TILE), y
        );
}
}
