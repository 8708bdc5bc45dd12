// A whole pass of a decoder in one call, for a CPU: embeddings, layers, last norm and output layer.
// kernels/cpu/layers.py says what it computes and calls it; compiled once for each instruction set
// (pyproject.toml), by whoever installs.
//
// A row comes out the same to the bit in any company and with any number of threads: every output
// is summed by one thread, over the inputs in order; blocks of attention stand at fixed positions.

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention.h"
#include "batch.h"

extern "C" {

struct Decoder {
    const Layer* layers;
    int32_t count;
    Shape shape;
    const uint8_t* embedding;  // [vocab, hidden] float32 or bfloat16; null: as the output layer
    int32_t embedding_is_bf16;
    const float* norm;         // [hidden]
    Matrix output_layer;
    const int64_t* drafted;    // [output_layer.n] the token of each output; null: its number
    const int64_t* read_as;    // [vocab] the embedding of each token; null: of its number
};
}

namespace {

struct Buffers {
    std::vector<float> x, normed, qkv, attended, gated, scores;
    std::vector<Inputs> of_normed, of_others;  // a product reads the one while it writes the other
};

void embed(const Decoder& model, int64_t token, float* x) {
    const int hidden = model.shape.hidden;
    if (model.read_as != nullptr) token = model.read_as[token];
    if (model.embedding == nullptr)
        unpack_rows(model.output_layer, token, 1, x);
    else if (model.embedding_is_bf16)
        for (int i = 0; i < hidden; i += LANES)
            store(x + i, from_bf16(model.embedding + 2 * (token * hidden + i)));
    else
        std::memcpy(x, (const float*)model.embedding + token * hidden, hidden * sizeof(float));
}

// Scores of the output layer from `first` on, by token.
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

// What attention does in every layer: for some blocks at a time, first all scores, then the rest.
struct Task {
    int block, kv_head, first;  // of its keys, or of its queries
};
struct Wave {  // of `chunks` and `queries`
    int chunk, num_chunks, query, num_queries;
};
struct Attention {
    std::vector<Attending> blocks;
    std::vector<Task> chunks, queries;
    std::vector<Wave> waves;
    int at_once;             // queries of a task
    int64_t num_scores = 0;  // of a wave, at most

    int64_t scores_of(int block, int kv_head, int group) const {
        const Attending& these = blocks[block];
        return these.scores + (int64_t)kv_head * these.count * group * these.width();
    }
};

constexpr int64_t MOST_SCORES = 1 << 16;  // of a wave and thread, if its first block has no more

Attention planned(int threads, const Shape& shape, const Batch& batch) {
    Attention plan;
    const int group = shape.heads / shape.kv_heads;
    const int64_t rows = batch.first_rows[batch.sequences];
    plan.at_once = (int)std::clamp<int64_t>(rows * shape.heads / (2 * threads), 1, 4);
    int64_t used = 0;
    for (int s = 0; s < batch.sequences; s++)
        for (int64_t row = batch.first_rows[s]; row < batch.first_rows[s + 1];) {
            const int behind = (int)(batch.first_rows[s + 1] - row);  // rows from here on
            const int count = std::min(behind, ATTENDED_ROWS);
            const int num_keys = (int)batch.lengths[s] - behind + count;
            const int32_t* pages = batch.block_table + batch.slots[s] * batch.block_table_stride;
            Attending these{(int)row, count, num_keys, pages, 0};
            const int64_t needed = (int64_t)count * shape.heads * these.width();
            if (plan.waves.empty() || used + needed > MOST_SCORES * threads) {
                plan.waves.push_back({(int)plan.chunks.size(), 0, (int)plan.queries.size(), 0});
                used = 0;
            }
            these.scores = used;
            used += needed;
            plan.num_scores = std::max(plan.num_scores, used);
            const int block = (int)plan.blocks.size();
            plan.blocks.push_back(these);
            for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
                for (int first = 0; first < num_keys; first += KEYS)
                    plan.chunks.push_back({block, kv_head, first});
                for (int first = 0; first < count * group; first += plan.at_once)
                    plan.queries.push_back({block, kv_head, first});
            }
            Wave& wave = plan.waves.back();
            wave.num_chunks = (int)plan.chunks.size() - wave.chunk;
            wave.num_queries = (int)plan.queries.size() - wave.query;
            row += count;
        }
    return plan;
}

void pass(
    Team& team, const Decoder& model, const Batch& batch, const Attention& plan, Buffers& buffers
) {
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
    bool reads_all = false;  // of the rows behind the last layer, not only those with logits
    for (int i = 0; i < batch.num_taps; i++) reads_all |= batch.tapped[i] >= model.count - 1;
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
        team.share(rows * kv_heads, [&](int task) { place(task / kv_heads, task % kv_heads); });
        for (const Wave& wave : plan.waves) {
            team.share(wave.num_chunks, [&](int task) {
                const auto [block, kv_head, first] = plan.chunks[wave.chunk + task];
                const Attending& these = plan.blocks[block];
                const float* queries = qkv + these.row * width + kv_head * group_width;
                float* scores = buffers.scores.data() + plan.scores_of(block, kv_head, group);
                auto how = shape.cache_is_bf16 ? score_keys<true> : score_keys<false>;
                how(layer, shape, these, kv_head, first, queries, width, scores);
            });
            team.share(wave.num_queries, [&](int task) {
                const auto [block, kv_head, first] = plan.queries[wave.query + task];
                const Attending& these = plan.blocks[block];
                const int count = std::min(plan.at_once, these.count * group - first);
                float* scores = buffers.scores.data() + plan.scores_of(block, kv_head, group);
                float* out = attended.x + these.row * attended_width + kv_head * group_width;
                auto how = shape.cache_is_bf16 ? attend<true> : attend<false>;
                how(layer, shape, these, kv_head, first, count, scores, out, attended_width);
                for (int q = first; dim % BLOCK == 0 && q < first + count; q++)
                    prepare(
                        layer.output, attended, these.row + q / group,
                        kv_head * group_width + q % group * dim, dim
                    );
            });
        }
        if (dim % BLOCK != 0)  // a block of inputs is of two heads
            team.share(rows, [&](int row) {
                prepare(layer.output, attended, row, 0, (int)attended_width);
            });
        product(team, layer.output, attended, add);
        const bool takes_all = l < model.count - 1 || reads_all;
        const int taken = takes_all ? rows : batch.num_logits;
        auto row_of = [&](int i) { return takes_all ? i : (int)batch.logits_rows[i]; };
        const Rows inputs{normed.x, taken, normed.inputs}, inner{middle.x, taken, middle.inputs};
        team.share(taken, [&](int i) {
            normalise_for(layer.gate_up, layer.mlp_norm, row_of(i), i);
        });
        gated(team, layer.gate_up, inputs, layer.down, inner);
        product(team, layer.down, inner, [&](int i, int first, const float* values, int count) {
            add(row_of(i), first, values, count);
        });
    }
    if (batch.num_taps > 0)
        team.share(rows, [&](int row) {
            float* of_row = normed.x + (int64_t)row * hidden;
            normalise(x + (int64_t)row * hidden, model.norm, hidden, shape.eps, of_row);
            tap(model.count, row, of_row);
        });
    team.share(batch.num_logits, [&](int i) {
        normalise_for(model.output_layer, model.norm, batch.logits_rows[i], i);
    });
    const Rows last{normed.x, batch.num_logits, normed.inputs};
    product(team, model.output_layer, last, [&](int row, int first, const float* scores, int count) {
        keep_logits(model, batch, row, first, scores, count);
    });
}

}  // namespace

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

PUBLIC const char* outrider_sources = OUTRIDER_SOURCES;  // a digest of all of them

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
    const Attention plan = planned(std::max(threads, 1), shape, *batch);
    if ((int64_t)mine.scores.size() < plan.num_scores) mine.scores.resize(plan.num_scores);
    on_team(threads, [&](Team& team) { pass(team, *model, *batch, plan, mine); });
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

PUBLIC void outrider_unpack(const Matrix* matrix, float* out, int32_t threads) {
    on_team(threads, [&](Team& team) {
        team.share((matrix->n + TILE - 1) / TILE, [&](int tile) {
            const int row = tile * TILE, count = std::min(matrix->n - row, TILE);
            unpack_rows(*matrix, row, count, out + (int64_t)row * matrix->k);
        });
    });
}

// A pass over rows in slots; `batch` lacks them.
PUBLIC void outrider_pass_in_slots(
    const Decoder* model, const Batch* batch, const Slots* given, int32_t threads
) {
    const int sequences = batch->sequences, page_size = model->shape.page_size;
    const int64_t* row_counts = given->row_counts;
    const int64_t count = std::accumulate(row_counts, row_counts + sequences, int64_t{0});
    thread_local std::vector<int64_t> numbers;
    numbers.resize(5 * count + 2 * sequences + 1);
    int64_t* at = numbers.data();
    int64_t *tokens = at, *logits_rows = at + count, *logits_row = logits_rows;
    int64_t* out = given->rows != nullptr ? given->rows : at + 2 * count;
    int64_t *slot_of_row = out, *positions = out + count, *places = out + 2 * count;
    int64_t *lengths = out + 3 * count, *first_rows = lengths + sequences;
    int64_t row = 0;
    for (int s = 0; s < sequences; s++) {
        const int64_t slot = given->slots[s], end = row + given->row_counts[s];
        int64_t position = given->num_tokens[slot] + given->starts[s];
        lengths[s] = position + given->row_counts[s];
        first_rows[s] = row;
        for (int64_t i = end - given->logits_counts[s]; i < end; i++) *logits_row++ = i;
        for (; row < end; row++, position++) {
            const int32_t page =
                batch->block_table[slot * batch->block_table_stride + position / page_size];
            slot_of_row[row] = slot;
            positions[row] = position;
            places[row] = (int64_t)page * page_size + position % page_size;
            tokens[row] = given->token_ids[slot * given->token_stride + position];
        }
    }
    first_rows[sequences] = row;
    Batch whole = *batch;
    whole.first_rows = first_rows, whole.lengths = lengths, whole.slots = given->slots;
    whole.token_ids = tokens, whole.positions = positions, whole.places = places;
    whole.logits_rows = logits_rows;
    outrider_pass(model, &whole, threads);
}
}
