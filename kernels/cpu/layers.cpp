// A whole pass of a decoder in one call, for a CPU: embeddings, layers, last norm and head.
// kernels/cpu/layers.py says what it computes and calls it; compiled once for each instruction set
// (pyproject.toml), by whoever installs.
//
// A row comes out the same to the bit in any company and with any number of threads: every output
// is summed by one thread, over the inputs in order; blocks of attention stand at fixed positions.

#include <utility>

#include "attention.h"

extern "C" {

struct Decoder {
    const Layer* layers;
    int32_t count;
    Shape shape;
    const uint8_t* embedding;  // [vocab, hidden] float32 or bfloat16; null: the head's matrix
    int32_t embedding_is_bf16;
    const float* norm;         // [hidden]
    Matrix head;
    const int64_t* drafted;    // [head.n] the token of each output; null: its number
};

struct Batch {  // every row belongs to a sequence
    int32_t sequences, num_logits;
    const int64_t *first_rows, *lengths, *slots;  // [sequences + 1], [sequences], [sequences]
    const int64_t *token_ids, *positions;         // [rows]
    const int64_t* places;                        // [rows], page * page_size + offset
    const int64_t* logits_rows;                   // [num_logits]
    const int32_t* block_table;
    int64_t block_table_stride;
    int32_t num_taps, is_bf16;
    const int32_t* tapped;                        // [num_taps] layers; -1: the embeddings
    float* taps;                                  // out: [rows, num_taps, hidden]
    uint8_t* logits;                              // out: [num_logits, vocab] float32 or bfloat16
    int64_t vocab_size;
};
}

namespace {

struct Buffers {
    std::vector<float> x, normed, qkv, attended, gated;
    std::vector<Inputs> of_normed, of_others;  // a product reads the one while it writes the other
};

void embed(const Decoder& model, int64_t token, float* x) {
    const int hidden = model.shape.hidden;
    if (model.embedding == nullptr)
        unpack_row(model.head, token, x);
    else if (model.embedding_is_bf16)
        for (int i = 0; i < hidden; i += LANES)
            store(x + i, from_bf16(model.embedding + 2 * (token * hidden + i)));
    else
        std::memcpy(x, (const float*)model.embedding + token * hidden, hidden * sizeof(float));
}

// Scores of the head's outputs from `first` on, by token.
void keep_logits(
    const Decoder& model, const Batch& batch, int row, int first, const float* scores, int count
) {
    float* to = (float*)batch.logits + row * batch.vocab_size;
    uint16_t* to_half = (uint16_t*)batch.logits + row * batch.vocab_size;
    if (model.drafted == nullptr && !batch.is_bf16) {
        std::memcpy(to + first, scores, count * sizeof(float));
        return;
    }
    for (int i = 0; i < count; i++) {
        const int64_t token = model.drafted == nullptr ? first + i : model.drafted[first + i];
        if (batch.is_bf16)
            to_half[token] = to_bf16(scores[i]);
        else
            to[token] = scores[i];
    }
}

void pass(Team& team, const Decoder& model, const Batch& batch, Buffers& buffers) {
    const Shape& shape = model.shape;
    const int rows = (int)batch.first_rows[batch.sequences];
    const int hidden = shape.hidden, dim = shape.head_dim, kv_heads = shape.kv_heads;
    const int group = shape.heads / kv_heads, group_width = group * dim;
    const int64_t width = (int64_t)(shape.heads + 2 * kv_heads) * dim;
    const int64_t attended_width = (int64_t)shape.heads * dim;
    float *x = buffers.x.data(), *qkv = buffers.qkv.data();
    const Rows normed{buffers.normed.data(), rows, buffers.of_normed.data()};
    const Rows attended{buffers.attended.data(), rows, buffers.of_others.data()};
    const Rows middle{buffers.gated.data(), rows, buffers.of_others.data()};
    auto add = [&](int row, int first, const float* values, int count) {
        float* to = x + (int64_t)row * hidden + first;
        for (int i = 0; i < count; i++) to[i] += values[i];
    };
    auto normalise_for = [&](const Matrix& matrix, const float* norm, int64_t from, int row) {
        normalise(x + from * hidden, norm, hidden, shape.eps, normed.x + (int64_t)row * hidden);
        prepare(matrix, normed, row, 0, hidden);
    };
    auto tap = [&](int layer, int row, const float* values) {
        for (int i = 0; i < batch.num_taps; i++)
            if (batch.tapped[i] == layer)
                std::memcpy(
                    batch.taps + ((int64_t)row * batch.num_taps + i) * hidden, values,
                    hidden * sizeof(float)
                );
    };
    // (sequence, its first row) of each block of rows that attend together
    std::vector<std::pair<int, int>> blocks;
    for (int s = 0; s < batch.sequences; s++)
        for (int64_t row = batch.first_rows[s]; row < batch.first_rows[s + 1]; row += ATTENDED_ROWS)
            blocks.push_back({s, (int)row});
    bool has_one_block_each = true;
    for (size_t i = 1; i < blocks.size(); i++)
        has_one_block_each &= blocks[i].first != blocks[i - 1].first;

    for (int l = 0;; l++) {
        const bool is_end = l == model.count;
        const Layer& layer = model.layers[is_end ? 0 : l];
        team.share(rows, [&](int row) {
            float* of_row = x + (int64_t)row * hidden;
            if (l == 0) embed(model, batch.token_ids[row], of_row);
            tap(l - 1, row, of_row);
            if (!is_end) normalise_for(layer.qkv, layer.norm, row, row);
        });
        if (is_end) break;
        product(team, layer.qkv, normed, [&](int row, int first, const float* values, int count) {
            std::memcpy(qkv + row * width + first, values, count * sizeof(float));
        });
        auto place = [&](int row, int kv_head) {  // turn a group's heads, and keep its KV
            const float* cos = layer.cos + batch.positions[row] * dim;
            const float* sin = layer.sin + batch.positions[row] * dim;
            float* queries = qkv + row * width + kv_head * group_width;
            for (int h = 0; h < group; h++)
                rotate(queries + h * dim, layer.q_norm, shape.head_eps, dim, cos, sin);
            float* key = qkv + row * width + (shape.heads + kv_head) * dim;
            rotate(key, layer.k_norm, shape.head_eps, dim, cos, sin);
            const int64_t at = (batch.places[row] * kv_heads + kv_head) * dim;
            keep(layer.keys, at, key, dim, shape.cache_is_bf16);
            keep(layer.values, at, key + kv_heads * dim, dim, shape.cache_is_bf16);
        };
        // A block reads the keys of its sequence's blocks before it. No sequence reads a page that
        // another fills in the same pass.
        if (!has_one_block_each)
            team.share(rows * kv_heads, [&](int task) { place(task / kv_heads, task % kv_heads); });
        team.share((int)blocks.size() * kv_heads, [&](int task) {
            const auto [s, row] = blocks[task / kv_heads];
            const int kv_head = task % kv_heads;
            const int behind = (int)batch.first_rows[s + 1] - row;  // rows from here on
            const int these = behind < ATTENDED_ROWS ? behind : ATTENDED_ROWS;
            for (int r = 0; has_one_block_each && r < these; r++) place(row + r, kv_head);
            const int num_keys = (int)batch.lengths[s] - behind + these;
            const int32_t* pages = batch.block_table + batch.slots[s] * batch.block_table_stride;
            const float* queries = qkv + row * width + kv_head * group_width;
            float* out = attended.x + row * attended_width + kv_head * group_width;
            auto how = shape.cache_is_bf16 ? attend<true> : attend<false>;
            how(layer, shape, pages, queries, width, these, num_keys, kv_head, out, attended_width);
            for (int r = 0; group_width % BLOCK == 0 && r < these; r++)
                prepare(layer.output, attended, row + r, kv_head * group_width, group_width);
        });
        if (group_width % BLOCK != 0)  // a block of inputs is of two groups
            team.share(rows, [&](int row) {
                prepare(layer.output, attended, row, 0, (int)attended_width);
            });
        product(team, layer.output, attended, add);
        team.share(rows, [&](int row) { normalise_for(layer.gate_up, layer.mlp_norm, row, row); });
        gated(team, layer.gate_up, normed, layer.down, middle);
        product(team, layer.down, middle, add);
    }
    if (batch.num_taps > 0)
        team.share(rows, [&](int row) {
            float* of_row = normed.x + (int64_t)row * hidden;
            normalise(x + (int64_t)row * hidden, model.norm, hidden, shape.eps, of_row);
            tap(model.count, row, of_row);
        });
    team.share(batch.num_logits, [&](int i) {
        normalise_for(model.head, model.norm, batch.logits_rows[i], i);
    });
    const Rows last{normed.x, batch.num_logits, normed.inputs};
    product(team, model.head, last, [&](int row, int first, const float* scores, int count) {
        keep_logits(model, batch, row, first, scores, count);
    });
}

}  // namespace

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

PUBLIC void outrider_pass(const Decoder* model, const Batch* batch, int32_t threads) {
    thread_local Buffers buffers;
    Buffers& mine = buffers;
    const Shape& shape = model->shape;
    const int64_t rows = std::max<int64_t>(batch->first_rows[batch->sequences], batch->num_logits);
    auto reserve = [&](auto& buffer, int64_t width) {
        if ((int64_t)buffer.size() < rows * width) buffer.resize(rows * width);
    };
    const int attended_width = shape.heads * shape.head_dim;
    reserve(mine.x, shape.hidden);
    reserve(mine.normed, shape.hidden);
    reserve(mine.qkv, (int64_t)(shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    reserve(mine.attended, attended_width);
    reserve(mine.gated, shape.intermediate);
    if (IN_INTEGERS) {
        reserve(mine.of_normed, shape.hidden / BLOCK);
        reserve(mine.of_others, std::max(attended_width, shape.intermediate) / BLOCK);
    }
    on_team(threads, [&](Team& team) { pass(team, *model, *batch, mine); });
}

PUBLIC void outrider_product(
    const Matrix* matrix, float* x, int32_t count, float* y, int32_t threads
) {
    thread_local std::vector<Inputs> inputs;
    const size_t needed = (size_t)count * (matrix->k / BLOCK);
    if (IN_INTEGERS && inputs.size() < needed) inputs.resize(needed);
    const Rows rows{x, count, inputs.data()};
    on_team(threads, [&](Team& team) {
        team.share(count, [&](int row) { prepare(*matrix, rows, row, 0, matrix->k); });
        product(team, *matrix, rows, [&](int row, int first, const float* values, int some) {
            std::memcpy(y + (int64_t)row * matrix->n + first, values, some * sizeof(float));
        });
    });
}

// Some rows of a batch, looked up: kernels/model/rows.py.
PUBLIC void outrider_read_rows(
    int32_t count, int32_t sequences, const int64_t* slot_of_row, const int64_t* positions,
    const int64_t* slots, const int64_t* lengths, const int64_t* num_tokens,
    const int32_t* token_ids, int64_t token_stride, const int32_t* block_table,
    int64_t table_stride, int64_t page_size, int64_t* out
) {
    int64_t *tokens = out, *absolute = out + count, *places = out + 2 * count;
    int64_t* to = out + 3 * count;
    for (int row = 0; row < count; row++) {
        const int64_t slot = slot_of_row[row], position = positions[row] + num_tokens[slot];
        const int64_t page = block_table[slot * table_stride + position / page_size];
        absolute[row] = position;
        tokens[row] = token_ids[slot * token_stride + position];
        places[row] = page * page_size + position % page_size;
    }
    for (int s = 0; s < sequences; s++) to[s] = lengths[s] + num_tokens[slots[s]];
}
}
