// One block of a transformer over the tokens of a pass, as modules/block.py defines it.
//
//     x ← post_norm( x + scale · out_norm( body( pre_norm(source) ) ) )      for each branch
//
// The structs are filled in by kernels/layout.py, field by field in the same order.
#pragma once
#include <memory>

#include "attention.h"
#include "norm.h"
#include "product.h"

namespace cutaway {

struct Attention {
    Matrix q, k, v, out;
    Norm q_norm, k_norm;
    int64_t n_heads, n_kv_heads, d_head;
    int64_t pairs, interleaved;         // of rotary positions; 0 pairs where there are none
    int64_t norm_width, norm_after;     // norm all heads as one vector; after the turn
    Reading reading;
    float clip, unused;                 // 0 for none
};

struct Feedforward {
    Matrix gate, up, down;
    int64_t curve;
};

struct Branch {
    Norm pre, out, post;
    int64_t kind;  // 0 attention, 1 feed-forward
    float scale, unused;
    Attention attention;
    Feedforward feedforward;
};

struct Block {
    int64_t d_model, n_branches, parallel, shared_norm;
    Branch branches[2];
};

// What layers with the same positions, slots and angles share in a pass.
struct Group {
    const float* cos;               // [batch · query, pairs], or of each position where there are turns
    const float* sin;
    const int64_t* turns;           // which row of those is each token's; null where they are in its place
    const int64_t* slots;           // where each token's keys and values go
    int64_t count;                  // slots that are read
    const int64_t* positions;       // of the keys there, −1 for none: [batch, count], rows so far apart:
    int64_t apart;
};

// A block, and where its keys and values are written and read.
struct Layer {
    const Block* block;
    float* k;                       // [batch, kv_head, slot, d_head], by strides
    float* v;
    int64_t row, head, slot;
    Keys keys;
    int64_t group;
};

// Tokens that are there: pads are left out.
struct Pass {
    const float* x;                 // the stream: [batch · query, d_model]
    float* y;                       // the stream after the last layer; pads are left as they are
    int64_t n;                      // tokens
    const int64_t* places;          // of each in the stream
    const int64_t* rows;            // of the batch
    const int64_t* positions;       // in its text
    int64_t batch;
    float* q;                       // the turned queries, between the halves: [n, n_heads · d_head]
    int64_t half;                   // 1: up to keys and values; 2: from attention on; 0: all
    const int64_t* asked;           // which tokens' results are asked for, in their order; null for all
    int64_t n_asked;
    Norm norm;                      // of the stream after the last layer
    // Of a whole step, from ids to logits; else null.
    const Matrix* table;            // whose rows, times `scale`, are the stream
    const int64_t* ids;
    const Matrix* head;             // what the stream is multiplied by in the end, and not written to y
    float* logits;                  // [n, rows of the head]
    float scale, unused;
};

// Rows of x are so far apart: whole groups, and no multiple of what the first cache repeats itself after.
inline int64_t padded(int64_t width) {
    const int64_t whole = in_groups(width) * GROUP;
    return whole % 256 ? whole : whole + GROUP;
}

class Runner {
  public:
    Runner(Pool& pool, const Pass& pass, const Group* groups) : pool_(pool), pass_(pass), groups_(groups) {}

    void run(const Layer* layers, int64_t count) {
        const int64_t d = layers[0].block->d_model, n = pass_.n;
        x_ = claim(0, n * d);
        if (pass_.table) each(n, [&](int64_t i) { look_up(i, d); });
        else each(n, [&](int64_t i) { std::memcpy(x_ + i * d, pass_.x + pass_.places[i] * d, bytes(d)); });
        find_blocks(layers, count);
        for (int64_t i = 0; i < count; i++) {
            layer_ = layers + i;
            block_ = layer_->block;
            ending_ = pass_.asked && i + 1 == count && !block_->parallel && !block_->shared_norm;
            group_ = groups_ + layer_->group;
            run_block();
        }
        if (pass_.head) return score(d);
        each(pass_.n, [&](int64_t i) { normed(pass_.norm, x_ + i * d, pass_.y + pass_.places[i] * d, d); });
    }

  private:
    static size_t bytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

    // Memory that stays from pass to pass.
    static float* claim(int which, int64_t floats) {
        static std::vector<float> held[12];
        if (held[which].size() < static_cast<size_t>(floats)) held[which].resize(static_cast<size_t>(floats));
        return held[which].data();
    }

    void look_up(int64_t i, int64_t d) {
        expand_any(*pass_.table, pass_.ids[i], x_ + i * d);
        if (pass_.scale != 1.0f)
            for (int64_t c = 0; c < d; c++) x_[i * d + c] *= pass_.scale;
    }

    void score(int64_t d) {
        read(pass_.norm, x_);
        multiply({{pass_.head, read_, pass_.logits, pass_.n, padded(d), pass_.head->rows, {}}});
    }

    void run_block() {
        const int64_t d = block_->d_model, n = pass_.n;
        out_ = claim(2, n * d);
        if (block_->parallel) {
            start_ = claim(3, n * d);
            std::memcpy(start_, x_, bytes(n * d));
        }
        for (int64_t b = 0; b < block_->n_branches; b++) {
            const Branch& branch = block_->branches[b];
            if (b == 0 || !block_->shared_norm) read(branch.pre, block_->parallel ? start_ : x_);
            if (branch.kind == 0) attend(branch.attention);
            else feed(branch.feedforward);
            if (pass_.half == 1) return;
            each(pass_.n, [&](int64_t i) { add(branch, i); });
        }
    }

    // Once for each group, not for each layer.
    void find_blocks(const Layer* layers, int64_t count) {
        int64_t n = 0;
        for (int64_t i = 0; i < count; i++) n = std::max(n, layers[i].group + 1);
        blocks_().resize(static_cast<size_t>(n * pass_.batch));
        each(n * pass_.batch, [&](int64_t i) {
            const Group& group = groups_[i / pass_.batch];
            const int64_t row = i % pass_.batch;
            blocks_()[static_cast<size_t>(i)].find(group.positions + row * group.apart, group.count);
        });
    }

    // Small loops over tokens, side by side where there are many.
    template <class Call>
    void each(int64_t n, const Call& call) {
        auto work = [](const void* what, int64_t from, int64_t to) {
            const Call& f = *static_cast<const Call*>(what);
            for (int64_t i = from; i < to; i++) f(i);
        };
        pool_.run(work, &call, n, n < 8 ? n : std::max<int64_t>(4, n / (pool_.threads() * 8)));
    }

    // What products of the branch read: the normed source, in rows that are padded; the source itself where that is so.
    void read(const Norm& norm, const float* source) {
        const int64_t d = block_->d_model, wide = padded(d);
        if (norm.kind == 0 && wide == d && !block_->shared_norm) {
            read_ = source;
            return;
        }
        float* into = claim(1, pass_.n * wide);
        read_ = into;
        each(pass_.n, [&](int64_t i) {
            normed(norm, source + i * d, into + i * wide, d);
            std::memset(into + i * wide + d, 0, bytes(wide - d));
        });
    }

    void add(const Branch& branch, int64_t i) {
        const int64_t d = block_->d_model;
        float *y = out_ + i * d, *x = x_ + i * d;
        normed(branch.out, y, y, d);
        for (int64_t c = 0; c < d; c++) x[c] += branch.scale == 1.0f ? y[c] : y[c] * branch.scale;
        normed(branch.post, x, x, d);
    }

    void multiply(std::initializer_list<Product> products) {
        Products all{{}, 0};
        for (const Product& p : products) all.of[all.count++] = p;
        cutaway::run(pool_, all);
    }

    void attend(const Attention& a) {
        const int64_t n = pass_.n, across = a.n_heads * a.d_head;
        const int64_t narrow = a.n_kv_heads * a.d_head, across_wide = padded(across);
        float* q = pass_.half ? pass_.q : claim(4, n * across);
        if (pass_.half != 2) project(a, q, claim(5, n * narrow), claim(6, n * narrow));
        if (pass_.half == 1) return;
        if (ending_) leave_out(q, across);
        float* z = claim(7, n * across_wide);
        mix(a, q, z, across, across_wide);
        multiply({{&a.out, z, out_, pass_.n, across_wide, block_->d_model}});
    }

    // Keys and values are where they belong: what else there is of tokens that nobody asks for need not be.
    void leave_out(float* q, int64_t across) {
        const int64_t d = block_->d_model;
        for (auto& each : left_) each.resize(static_cast<size_t>(pass_.n_asked));
        for (int64_t j = 0; j < pass_.n_asked; j++) {
            const int64_t i = pass_.asked[j];
            std::memmove(x_ + j * d, x_ + i * d, bytes(d));
            std::memmove(q + j * across, q + i * across, bytes(across));
            left_[0][static_cast<size_t>(j)] = pass_.places[i];
            left_[1][static_cast<size_t>(j)] = pass_.rows[i];
            left_[2][static_cast<size_t>(j)] = pass_.positions[i];
        }
        pass_.n = pass_.n_asked;
        pass_.places = left_[0].data();
        pass_.rows = left_[1].data();
        pass_.positions = left_[2].data();
        ending_ = false;
    }

    // Queries, turned; keys and values, written where they belong.
    void project(const Attention& a, float* q, float* k, float* v) {
        const int64_t n = pass_.n, wide = padded(block_->d_model);
        const int64_t across = a.n_heads * a.d_head, narrow = a.n_kv_heads * a.d_head;
        multiply({{&a.q, read_, q, n, wide, across}, {&a.k, read_, k, n, wide, narrow}, {&a.v, read_, v, n, wide, narrow}});
        each(n, [&](int64_t i) {
            if (a.clip != 0) {
                for (int64_t c = 0; c < across; c++) q[i * across + c] = clipped(q[i * across + c], a.clip);
                for (int64_t c = 0; c < narrow; c++) k[i * narrow + c] = clipped(k[i * narrow + c], a.clip);
                for (int64_t c = 0; c < narrow; c++) v[i * narrow + c] = clipped(v[i * narrow + c], a.clip);
            }
            place(a, a.q_norm, q + i * across, a.n_heads, i);
            place(a, a.k_norm, k + i * narrow, a.n_kv_heads, i);
            for (int64_t h = 0; h < a.n_kv_heads; h++) {
                const int64_t to = pass_.rows[i] * layer_->row + h * layer_->head + group_->slots[i] * layer_->slot;
                std::memcpy(layer_->k + to, k + i * narrow + h * a.d_head, bytes(a.d_head));
                std::memcpy(layer_->v + to, v + i * narrow + h * a.d_head, bytes(a.d_head));
            }
        });
    }

    static float clipped(float x, float most) { return std::min(std::max(x, -most), most); }

    // Norm and turn the heads of one token.
    void place(const Attention& a, const Norm& norm, float* x, int64_t heads, int64_t i) {
        if (!a.norm_after) norm_heads(a, norm, x, heads);
        if (a.pairs) {
            const int64_t at = (group_->turns ? group_->turns : pass_.places)[i] * a.pairs;
            for (int64_t h = 0; h < heads; h++)
                turned(x + h * a.d_head, group_->cos + at, group_->sin + at, a.pairs, a.interleaved != 0);
        }
        if (a.norm_after) norm_heads(a, norm, x, heads);
    }

    static void norm_heads(const Attention& a, const Norm& norm, float* x, int64_t heads) {
        if (norm.kind == 0) return;
        if (a.norm_width) normed(norm, x, x, heads * a.d_head);
        else for (int64_t h = 0; h < heads; h++) normed(norm, x + h * a.d_head, x + h * a.d_head, a.d_head);
    }

    // Queries of one row and one key/value head go through its blocks together.
    struct Tile {
        int64_t row, head, from;  // token
        int count;                // queries
        int group;                // the first of them, within its token's
    };

    void mix(const Attention& a, const float* q, float* z, int64_t across, int64_t across_wide) {
        const int64_t group = a.n_heads / a.n_kv_heads;
        const Blocks* blocks = blocks_().data() + layer_->group * pass_.batch;
        Keys keys = layer_->keys;
        keys.count = group_->count;
        keys.positions = group_->positions;
        keys.apart = group_->apart;
        static std::vector<Tile> tiles;
        tiles.clear();
        for (int64_t i = 0; i < pass_.n;) {
            int64_t stop = i;
            while (stop < pass_.n && pass_.rows[stop] == pass_.rows[i]) stop++;
            for (int64_t h = 0; h < a.n_kv_heads; h++)
                for (int64_t p = 0; p < (stop - i) * group; p += RUN)
                    tiles.push_back({pass_.rows[i], h, i + p / group,
                                     static_cast<int>(std::min<int64_t>(RUN, (stop - i) * group - p)),
                                     static_cast<int>(p % group)});
            i = stop;
        }
        auto call = [&](int64_t t) {
            const Tile& tile = tiles[static_cast<size_t>(t)];
            Query queries[RUN];
            for (int j = 0; j < tile.count; j++) {
                const int64_t i = tile.from + (tile.group + j) / group;
                const int64_t h = tile.head * group + (tile.group + j) % group;
                queries[j] = {q + i * across + h * a.d_head, z + i * across_wide + h * a.d_head, pass_.positions[i]};
            }
            cutaway::attend(queries, tile.count, keys, blocks[tile.row], a.reading,
                            tile.row, tile.head, a.d_head);
        };
        const auto count = static_cast<int64_t>(tiles.size());
        auto work = [](const void* what, int64_t from, int64_t to) {
            const auto& f = *static_cast<const decltype(call)*>(what);
            for (int64_t t = from; t < to; t++) f(t);
        };
        pool_.run(work, &call, count, 1 + count / 256);
        if (across_wide > across)
            each(pass_.n, [&](int64_t i) { std::memset(z + i * across_wide + across, 0, bytes(across_wide - across)); });
    }

    static std::vector<Blocks>& blocks_() {
        static std::vector<Blocks> held;
        return held;
    }

    void feed(const Feedforward& f) {
        const int64_t n = pass_.n, wide = padded(block_->d_model), inner = f.up.rows, inner_wide = padded(inner);
        float *up = claim(8, n * inner_wide), *gate = claim(9, n * inner_wide);
        if (f.gate.data) multiply({{&f.gate, read_, gate, n, wide, inner_wide}, {&f.up, read_, up, n, wide, inner_wide}});
        else multiply({{&f.up, read_, up, n, wide, inner_wide}});
        each(n, [&](int64_t i) {
            float *u = up + i * inner_wide, *g = gate + i * inner_wide;
            std::memset(u + inner, 0, bytes(inner_wide - inner));
            if (f.gate.data) std::memset(g + inner, 0, bytes(inner_wide - inner));
            for (int64_t c = 0; c < inner_wide; c += LANES)
                store(u + c, f.gate.data ? mul(curved(static_cast<int32_t>(f.curve), load(g + c)), load(u + c))
                                         : curved(static_cast<int32_t>(f.curve), load(u + c)));
        });
        multiply({{&f.down, up, out_, n, inner_wide, block_->d_model}});
    }

    Pool& pool_;
    Pass pass_;
    const Group* groups_;
    std::vector<int64_t> left_[3];  // places, rows and positions of the tokens that are asked for
    bool ending_ = false;           // others are left out of the rest of this layer
    const Layer* layer_ = nullptr;
    const Block* block_ = nullptr;
    const Group* group_ = nullptr;
    const float* read_ = nullptr;
    float *x_ = nullptr, *out_ = nullptr, *start_ = nullptr;
};

}  // namespace cutaway
