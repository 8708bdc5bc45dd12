// Products with packed matrices (packing.py): in integers where the processor is fast at these
// (integers.h), else in float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats.h"
#include "integers.h"
#include "team.h"

extern "C" {

struct Matrix {  // packing.py
    const uint8_t* data;
    const float* bias;  // or null
    int32_t n, k, format;
};
}

namespace {

constexpr int MAX_ROWS = 8;  // of a tile that is computed at once
#if defined(__AVX512F__)
constexpr int FLOAT_ROWS = 8;  // that share what they unpack: as many as registers hold
#else
constexpr int FLOAT_ROWS = 2;
#endif

// ---- in float32: out[r][t] = sum over k of x[r][k] w[k][t], group by group; R rows, TILES tiles

template <class FORMAT, int R, int TILES>
inline void tiles(
    const uint8_t* const* weights, int k, const float* x, int64_t x_stride, float* out
) {
    using Codes = typename FORMAT::Codes;
    F acc[R][TILES][2] = {};
    const uint8_t* at[TILES];
    for (int t = 0; t < TILES; t++) at[t] = weights[t];
    for (int first = 0; first < k; first += FORMAT::group) {
        F scale[TILES][2], offset[TILES][2];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) {
            FORMAT::scales(at[t], scale[t], offset[t]);
            at[t] += FORMAT::scale_bytes;
        }
        F part[R][TILES][2] = {};  // sums of few are more exact than one of all
        for (int quad = 0; quad < FORMAT::group / QUAD; quad++) {
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; i++) {
#pragma GCC unroll 4
                for (int t = 0; t < TILES; t++) {
                    F w[2];
                    Codes::unpack(at[t] + quad * Codes::quad_bytes, i, scale[t], offset[t], w);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const F input = splat(x[r * x_stride + first + quad * QUAD + i]);
                        part[r][t][0] += w[0] * input;
                        part[r][t][1] += w[1] * input;
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) acc[r][t][half] += part[r][t][half];
        for (int t = 0; t < TILES; t++) at[t] += FORMAT::code_bytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                store(out + (r * TILES + t) * TILE + half * LANES, acc[r][t][half]);
}

// Rows of the matrix, which are `count` outputs of one tile from `output` on.
template <class FORMAT>
void unpacked_rows(const uint8_t* at, int k, int output, int count, float* out) {
    for (int first = 0; first < k; first += FORMAT::group) {
        F scale[2], offset[2], w[2];
        FORMAT::scales(at, scale, offset);
        at += FORMAT::scale_bytes;
        for (int i = 0; i < FORMAT::group; i++) {
            const int quad = i / QUAD;
            FORMAT::Codes::unpack(at + quad * FORMAT::Codes::quad_bytes, i % QUAD, scale, offset, w);
            for (int r = 0; r < count; r++)
                out[(int64_t)r * k + first + i] = w[(output + r) / LANES][(output + r) % LANES];
        }
        at += FORMAT::code_bytes;
    }
}

using Tiles = void (*)(const uint8_t* const*, int, const float*, int64_t, float*);
using UnpackedRows = void (*)(const uint8_t*, int, int, int, float*);
using IntegerTile = void (*)(const uint8_t*, int, const Inputs*, int64_t, float*, int);

struct Product {
    int block_bytes;
    UnpackedRows unpacked_rows;
    Tiles two_tiles[2], one_tile[8];          // by rows less one
    IntegerTile integer_tile[INTEGER_ROWS];  // likewise; null: not for this format
};

template <class FORMAT>
constexpr Product product_of() {
    Product product = {
        FORMAT::block_bytes,
        unpacked_rows<FORMAT>,
        {tiles<FORMAT, 1, 2>, tiles<FORMAT, 2, 2>},
        {tiles<FORMAT, 1, 1>, tiles<FORMAT, 2, 1>, tiles<FORMAT, 3, 1>, tiles<FORMAT, 4, 1>,
         tiles<FORMAT, 5, 1>, tiles<FORMAT, 6, 1>, tiles<FORMAT, 7, 1>, tiles<FORMAT, 8, 1>},
        {},
    };
#if defined(__AVX2__)
    if constexpr (FORMAT::Codes::has_scale) {
        product.integer_tile[0] = integer_tile<FORMAT, 1>;
        product.integer_tile[1] = integer_tile<FORMAT, 2>;
        product.integer_tile[2] = integer_tile<FORMAT, 3>;
        product.integer_tile[3] = integer_tile<FORMAT, 4>;
    }
#endif
    return product;
}

const Product PRODUCTS[] = {
    product_of<Format<Four, HalfScale, 32>>(),    // Q4_0, Q4_1
    product_of<Format<Four, FloatScale, 32>>(),   // Q4_K
    product_of<Format<Eight, HalfScale, 32>>(),   // Q8_0
    product_of<Format<Eight, FloatScale, 16>>(),  // Q6_K
    product_of<Format<Plain, FloatScale, 32>>(),
};

// Rows of a matrix, as float32; all of one tile.
void unpack_rows(const Matrix& matrix, int64_t row, int count, float* out) {
    const Product& format = PRODUCTS[matrix.format];
    const int64_t tile_bytes = (int64_t)format.block_bytes * (matrix.k / BLOCK);
    const uint8_t* tile = matrix.data + row / TILE * tile_bytes;
    format.unpacked_rows(tile, matrix.k, (int)(row % TILE), count, out);
}

// ---- stages

// The rows that a product reads; in integers it reads `inputs`, which `prepare` makes of x.
struct Rows {
    float* x;  // [count, k]
    int count;
    Inputs* inputs;  // [count, k / BLOCK]
};

inline bool is_of_integers(const Matrix& matrix) {
    return IN_INTEGERS && PRODUCTS[matrix.format].integer_tile[0] != nullptr;
}

// What must be done with each input before a product: these begin at `first`, a multiple of BLOCK.
inline void prepare(const Matrix& matrix, const Rows& rows, int row, int first, int count) {
    if (!is_of_integers(matrix)) return;
    const int64_t at = (int64_t)row * matrix.k + first;
    to_inputs(rows.x + at, count, rows.inputs + at / BLOCK);
}

// Up to MAX_ROWS rows of a tile of outputs, in float32 also of the next. out [rows][tiles * TILE]
void some_tiles(
    const Matrix& matrix, int first_tile, int num_tiles, const Rows& all, int row, int rows,
    float* out
) {
    const Product& product = PRODUCTS[matrix.format];
    const int blocks = matrix.k / BLOCK;
    const int64_t tile_bytes = (int64_t)product.block_bytes * blocks;
    const uint8_t* tile = matrix.data + first_tile * tile_bytes;
    const uint8_t* weights[2] = {tile, tile + tile_bytes};
    const float* x = all.x + (int64_t)row * matrix.k;
    const int width = num_tiles * TILE;
    if (is_of_integers(matrix)) {
        for (int r = 0; r < rows; r += INTEGER_ROWS) {
            const int some = rows - r < INTEGER_ROWS ? rows - r : INTEGER_ROWS;
            const Inputs* inputs = &all.inputs[(size_t)(row + r) * blocks];
            product.integer_tile[some - 1](tile, blocks, inputs, blocks, out + r * width, width);
        }
    } else if (num_tiles == 2 && rows <= 2) {
        product.two_tiles[rows - 1](weights, matrix.k, x, matrix.k, out);
    } else {
        float part[FLOAT_ROWS * TILE];
        for (int t = 0; t < num_tiles; t++)
            for (int r = 0; r < rows; r += FLOAT_ROWS) {
                const int some = rows - r < FLOAT_ROWS ? rows - r : FLOAT_ROWS;
                product.one_tile[some - 1](
                    weights + t, matrix.k, x + (int64_t)r * matrix.k, matrix.k, part
                );
                for (int i = 0; i < some; i++)
                    std::memcpy(
                        out + (r + i) * width + t * TILE, part + i * TILE, TILE * sizeof(float)
                    );
            }
    }
    if (matrix.bias == nullptr) return;
    const int first = first_tile * TILE, count = std::min(matrix.n - first, width);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < count; i++) out[r * width + i] += matrix.bias[first + i];
}

// x W^T + b. `take(row, first, values, count)` is given the outputs from `first` on.
template <class TAKE>
void product(Team& team, const Matrix& matrix, const Rows& rows, TAKE take) {
    const int num_tiles = (matrix.n + TILE - 1) / TILE;
    const int at_once = is_of_integers(matrix) ? 1 : 2;  // in float32 two share their inputs
    team.share((num_tiles + at_once - 1) / at_once, [&](int task) {
        const int first = at_once * task;
        const int tiles = std::min(at_once, num_tiles - first), width = tiles * TILE;
        const int count = std::min(matrix.n - first * TILE, width);
        float out[MAX_ROWS * 2 * TILE];
        for (int row = 0; row < rows.count; row += MAX_ROWS) {
            const int some = rows.count - row < MAX_ROWS ? rows.count - row : MAX_ROWS;
            some_tiles(matrix, first, tiles, rows, row, some, out);
            for (int r = 0; r < some; r++) take(row + r, first * TILE, out + r * width, count);
        }
    });
}

// y = silu(gate) * up, prepared for the next product. The outputs are the gate's, then those of up:
// each half by itself, since memory gives more to threads that read on in a row.
void gated(
    Team& team, const Matrix& matrix, const Rows& rows, const Matrix& next, const Rows& y
) {
    const int width = matrix.n / 2;
    Matrix gate = matrix, up = matrix;
    gate.n = up.n = width;
    up.data += (int64_t)PRODUCTS[matrix.format].block_bytes * (matrix.k / BLOCK) * (width / TILE);
    if (matrix.bias != nullptr) up.bias += width;
    auto at = [&](int row, int first) { return y.x + (int64_t)row * width + first; };
    product(team, gate, rows, [&](int row, int first, const float* values, int count) {
        std::memcpy(at(row, first), values, count * sizeof(float));
    });
    product(team, up, rows, [&](int row, int first, const float* values, int count) {
        float* to = at(row, first);
        for (int i = 0; i < count; i += LANES) {
            const F gate = load(to + i), silu = gate / (splat(1.0f) + exponential(-gate));
            store(to + i, silu * load(values + i));
        }
        prepare(next, y, row, first, count);
    });
}

}  // namespace
