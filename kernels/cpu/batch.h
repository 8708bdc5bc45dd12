// The rows that a pass of a decoder computes, and where they are looked up.
#pragma once

#include <cstdint>

extern "C" {

struct Batch {  // every row belongs to a sequence
    int32_t sequences, num_logits;
    const int64_t *first_rows, *lengths, *slots;  // [sequences + 1], [sequences], [sequences]
    const int64_t *token_ids, *positions;         // [rows]
    const int64_t* places;                        // [rows], page * page_size + offset
    const int64_t* logits_rows;                   // [num_logits], distinct
    const int32_t* block_table;
    int64_t block_table_stride;
    int32_t num_taps, is_bf16;
    const int32_t* tapped;                        // [num_taps] layers; -1: the embeddings
    float* taps;                                  // out: [rows, num_taps, hidden]
    uint8_t* logits;                              // out: [num_logits, vocab] float32 or bfloat16
    int64_t vocab_size;
};

// Where the rows of a batch are looked up. Per sequence: its slot, its first row relative to its
// known tokens, its rows, and how many of the last of them get logits.
struct Slots {
    const int64_t *slots, *starts, *row_counts, *logits_counts;
    const int64_t* num_tokens;  // [slots]
    const int32_t* token_ids;   // [slots][token_stride]
    int64_t token_stride;
    // Out, or null: [rows] slots, positions and places; [sequences] lengths, and first rows and end.
    int64_t* rows;
};

struct Decoder;
void outrider_pass_in_slots(
    const Decoder* model, const Batch* batch, const Slots* given, int32_t threads
);
}
