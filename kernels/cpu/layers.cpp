// Whole layers of a decoder in one call, for a CPU. kernels/cpu/layers.py says what they compute
// and calls them; compiled once for each instruction set (pyproject.toml), by whoever installs.
//
// A row comes out the same to the bit in any company and with any number of threads: every output
// is summed by one thread, over the inputs in order; blocks of attention stand at fixed positions.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int TILE = 2 * LANES, BLOCK = 32;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;  // that share what they read of a weight: as many as registers hold
#else
constexpr int MAX_ROWS = 2;
#endif

// ---- formats: how a tile of 32 outputs keeps 32 inputs (packing.py writes them)

struct Four {  // 4 bits, unsigned; w = scale * q + offset
    static constexpr bool has_offset = true, has_scale = true;
    static constexpr int row_bytes = 16;
    static inline void unpack(const uint8_t* p, const F* scale, const F* offset, F* w) {
        I low;
        from_u8(p, &low);
        I high = (I)((U)low >> 4);
        low &= 15;
        w[0] = __builtin_convertvector(low, F) * scale[0] + offset[0];
        w[1] = __builtin_convertvector(high, F) * scale[1] + offset[1];
    }
};
struct Eight {  // 8 bits, signed; w = scale * q
    static constexpr bool has_offset = false, has_scale = true;
    static constexpr int row_bytes = 32;
    static inline void unpack(const uint8_t* p, const F* scale, const F*, F* w) {
        w[0] = from_i8(p) * scale[0];
        w[1] = from_i8(p + 16) * scale[1];
    }
};
struct Plain {  // float32
    static constexpr bool has_offset = false, has_scale = false;
    static constexpr int row_bytes = 128;
    static inline void unpack(const uint8_t* p, const F*, const F*, F* w) {
        std::memcpy(w, p, 2 * sizeof(F));
    }
};
struct HalfScale {
    static constexpr int bytes = 2;
    static inline F get(const uint8_t* p) { return from_half(p); }
};
struct FloatScale {
    static constexpr int bytes = 4;
    static inline F get(const uint8_t* p) {
        F v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
};

template <class CODES, class SCALE, int GROUP>
struct Format {
    using Codes = CODES;
    using Scale = SCALE;
    static constexpr int group = GROUP;
    static constexpr int vectors = Codes::has_scale + Codes::has_offset;
    static constexpr int scale_bytes = vectors * TILE * Scale::bytes;  // of a group
    static constexpr int group_bytes = scale_bytes + GROUP * Codes::row_bytes;
    static constexpr int block_bytes = BLOCK / GROUP * group_bytes;
};

// R rows by TILES tiles: out[r][t] = sum over k of x[r][k] w[k][t], group by group.
template <class FORMAT, int R, int TILES>
inline void tiles(
    const uint8_t* const* weights, int k, const float* x, int64_t x_stride, float* out
) {
    using Codes = typename FORMAT::Codes;
    using Scale = typename FORMAT::Scale;
    F acc[R][TILES][2] = {};
    const uint8_t* at[TILES];
    for (int t = 0; t < TILES; t++) at[t] = weights[t];
    for (int first = 0; first < k; first += FORMAT::group) {
        F scale[TILES][2], offset[TILES][2];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                constexpr int step = LANES * Scale::bytes;
                if (Codes::has_scale) scale[t][half] = Scale::get(at[t] + half * step);
                if (Codes::has_offset) offset[t][half] = Scale::get(at[t] + (2 + half) * step);
            }
            at[t] += FORMAT::scale_bytes;
        }
        F part[R][TILES][2] = {};  // sums of few are more exact than one of all
        for (int i = 0; i < FORMAT::group; i++) {
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++) {
                F w[2];
                Codes::unpack(at[t] + i * Codes::row_bytes, scale[t], offset[t], w);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    F input = splat(x[r * x_stride + first + i]);
                    part[r][t][0] += w[0] * input;
                    part[r][t][1] += w[1] * input;
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) acc[r][t][half] += part[r][t][half];
        for (int t = 0; t < TILES; t++) at[t] += FORMAT::group * Codes::row_bytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                store(out + (r * TILES + t) * TILE + half * LANES, acc[r][t][half]);
}

using Tiles = void (*)(const uint8_t* const*, int, const float*, int64_t, float*);

struct Product {
    int block_bytes;
    Tiles two_tiles[2], one_tile[8];  // by rows less one
};

template <class FORMAT>
constexpr Product product_of() {
    return {
        FORMAT::block_bytes,
        {tiles<FORMAT, 1, 2>, tiles<FORMAT, 2, 2>},
        {tiles<FORMAT, 1, 1>, tiles<FORMAT, 2, 1>, tiles<FORMAT, 3, 1>, tiles<FORMAT, 4, 1>,
         tiles<FORMAT, 5, 1>, tiles<FORMAT, 6, 1>, tiles<FORMAT, 7, 1>, tiles<FORMAT, 8, 1>},
    };
}

const Product PRODUCTS[] = {
    product_of<Format<Four, HalfScale, 32>>(),    // Q4_0, Q4_1
    product_of<Format<Four, FloatScale, 32>>(),   // Q4_K
    product_of<Format<Eight, HalfScale, 32>>(),   // Q8_0
    product_of<Format<Eight, FloatScale, 16>>(),  // Q6_K
    product_of<Format<Plain, FloatScale, 32>>(),
};

}  // namespace

extern "C" {

struct Matrix {  // packing.py
    const uint8_t* data;
    const float* bias;  // or null
    int32_t n, k, format;
};

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

// ---- stages

// Up to MAX_ROWS rows of one tile of outputs, or of two. out [rows][tiles * TILE]
void some_tiles(
    const Matrix& matrix, int first_tile, int second_tile, const float* x, int rows, float* out
) {
    const Product& product = PRODUCTS[matrix.format];
    const int64_t tile_bytes = (int64_t)product.block_bytes * (matrix.k / BLOCK);
    const uint8_t* weights[2] = {
        matrix.data + first_tile * tile_bytes, matrix.data + second_tile * tile_bytes
    };
    if (second_tile < 0) {
        product.one_tile[rows - 1](weights, matrix.k, x, matrix.k, out);
    } else if (rows <= 2) {
        product.two_tiles[rows - 1](weights, matrix.k, x, matrix.k, out);
    } else {
        float part[MAX_ROWS * TILE];
        for (int t = 0; t < 2; t++) {
            product.one_tile[rows - 1](weights + t, matrix.k, x, matrix.k, part);
            for (int r = 0; r < rows; r++)
                std::memcpy(out + (r * 2 + t) * TILE, part + r * TILE, TILE * sizeof(float));
        }
    }
    if (matrix.bias != nullptr)
        for (int t = 0; t < (second_tile < 0 ? 1 : 2); t++) {
            const int first = (t ? second_tile : first_tile) * TILE;
            const int count = matrix.n - first < TILE ? matrix.n - first : TILE;
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < count; i++)
                    out[(r * (second_tile < 0 ? 1 : 2) + t) * TILE + i] += matrix.bias[first + i];
        }
}

// y = x W^T + b, or y += it. Shape: x [rows, k], y [rows, n]
template <bool ADDS>
void product(Team& team, const Matrix& matrix, const float* x, int rows, float* y) {
    const int num_tiles = (matrix.n + TILE - 1) / TILE;
    team.share((num_tiles + 1) / 2, [&](int task) {
        const int first = 2 * task, second = first + 1 < num_tiles ? first + 1 : -1;
        const int width = second < 0 ? TILE : 2 * TILE;
        const int count = matrix.n - first * TILE < width ? matrix.n - first * TILE : width;
        float out[MAX_ROWS * 2 * TILE];
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int some = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            some_tiles(matrix, first, second, x + (int64_t)row * matrix.k, some, out);
            for (int r = 0; r < some; r++) {
                float* to = y + (int64_t)(row + r) * matrix.n + first * TILE;
                if (ADDS)
                    for (int i = 0; i < count; i++) to[i] += out[r * width + i];
                else
                    std::memcpy(to, out + r * width, count * sizeof(float));
            }
        }
    });
}

// silu(gate) * up. gate_up's outputs are the gate's, then those of `up`.
void gated(Team& team, const Matrix& matrix, const float* x, int rows, float* y) {
    const int num_outputs = matrix.n / 2, num_tiles = num_outputs / TILE;
    team.share(num_tiles, [&](int tile) {
        float out[MAX_ROWS * 2 * TILE];
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int some = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            some_tiles(matrix, tile, tile + num_tiles, x + (int64_t)row * matrix.k, some, out);
            for (int r = 0; r < some; r++)
                for (int half = 0; half < TILE; half += LANES) {
                    const F gate = load(out + r * 2 * TILE + half);
                    const F up = load(out + r * 2 * TILE + TILE + half);
                    const F silu = gate / (splat(1.0f) + exponential(-gate));
                    store(y + (int64_t)(row + r) * num_outputs + tile * TILE + half, silu * up);
                }
        }
    });
}

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
    auto place = [&](int token) {
        const int64_t page = pages[token / shape.page_size];
        return ((page * shape.page_size + token % shape.page_size) * shape.kv_heads + kv_head) * dim;
    };
    for (int first = begin; first < num_keys; first += LANES) {
        const int some = num_keys - first < LANES ? num_keys - first : LANES;
        for (int j = 0; j < some; j++) {
            const int64_t at = place(first + j);
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
            highest = v > highest ? v : highest;
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
        float* to = out + q / group * out_stride + q % group * dim;
        for (int d = 0; d < dim; d += 4 * LANES) {
            const int vectors = (dim - d) / LANES < 4 ? (dim - d) / LANES : 4;
            F acc[4] = {};
            for (int j = start; j < stop; j++) {
                const int64_t at = place(begin + j) + d;
                const F p = splat(of_row[j]);
                for (int v = 0; v < vectors; v++)
                    acc[v] += p * from_cache<BF16>(layer.values, at + v * LANES);
            }
            for (int v = 0; v < vectors; v++) store(to + d + v * LANES, acc[v] * splat(scale));
        }
    }
}

struct Buffers {
    std::vector<float> normed, qkv, attended, gated;
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
        product<false>(team, layer.qkv, normed, rows, qkv);
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
        product<true>(team, layer.output, attended, rows, x);
        team.share(rows, [&](int row) {
            const int64_t at = (int64_t)row * hidden;
            normalise(x + at, layer.mlp_norm, hidden, shape.eps, normed + at);
        });
        gated(team, layer.gate_up, normed, rows, middle);
        product<true>(team, layer.down, middle, rows, x);
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
    auto reserve = [&](std::vector<float>& buffer, size_t width) {
        if (buffer.size() < rows * width) buffer.resize(rows * width);
    };
    reserve(buffers.normed, shape->hidden);
    reserve(buffers.qkv, (size_t)(shape->heads + 2 * shape->kv_heads) * shape->head_dim);
    reserve(buffers.attended, (size_t)shape->heads * shape->head_dim);
    reserve(buffers.gated, shape->intermediate);
    Buffers& mine = buffers;
    on_team(threads, [&](Team& team) { layers(team, all, count, *shape, *batch, x, mine); });
}

__attribute__((visibility("default"))) void outrider_product(
    const Matrix* matrix, const float* x, int32_t rows, float* y, int32_t threads
) {
    on_team(threads, [&](Team& team) { product<false>(team, *matrix, x, rows, y); });
}
}
