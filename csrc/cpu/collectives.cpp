// SPDX-License-Identifier: Apache-2.0
// What crosses ranks through memory that they share. What does not fit there goes in pieces.

#include "kernels.h"
#include "segment.h"

#include <type_traits>

namespace quire { namespace QUIRE_ISA { namespace {

// A long row is cut, so that every thread has a part of it; a multiple of the vector length.
constexpr int64_t kTile = 4096;

// Calls body(begin, end) for ranges that make up [0, size), each some tiles.
template <class Body>
inline void share_tiles(int64_t size, Body body) {
    share_ranges((size + kTile - 1) / kTile, kElementWork * size, [=](int64_t first, int64_t last) {
        body(first * kTile, last * kTile < size ? last * kTile : size);
    });
}

template <class T> inline Vec rounded(Vec v, T) { return widen(narrow(v, T{}), T{}); }
inline Vec rounded(Vec v, Float32) { return v; }

// How many parts are in the first half of the tree: the largest power of two that leaves some for the second.
constexpr int64_t first_half(int64_t count) {
    int64_t half = 1;
    while (2 * half < count) half *= 2;
    return half;
}

// Neighbors are added, then the sums of neighbors, and so on; every sum is rounded to the parts' type.
template <int64_t count, class T, class Lanes>
inline Vec tree_sum(const T* const* parts, int64_t i, Lanes lanes) {
    if constexpr (count == 1) {
        return load(parts[0] + i, lanes);
    } else {
        constexpr int64_t half = first_half(count);
        return rounded(tree_sum<half>(parts, i, lanes) + tree_sum<count - half>(parts + half, i, lanes), T{});
    }
}

// Calls body with the number of ranks as a constant; returns -1 for one that is too large.
template <int64_t count = 1, class Body>
inline int64_t with_ranks(int64_t ranks, Body body) {
    if constexpr (count > kMostRanks) {
        return -1;
    } else if (ranks == count) {
        return body(std::integral_constant<int64_t, count>{});
    } else {
        return with_ranks<count + 1>(ranks, body);
    }
}

template <int64_t ranks, class T>
inline int64_t all_reduce_of(T* out, const T* x, Exchange exchange, int64_t size) {
    const int64_t most = exchange.most_bytes() / static_cast<int64_t>(sizeof(T));
    for (int64_t start = 0; start < size; start += most) {
        const int64_t count = size - start < most ? size - start : most;
        T* const place = static_cast<T*>(exchange.place());
        share_tiles(count, [=](int64_t begin, int64_t end) {
            __builtin_memcpy(place + begin, x + start + begin, (end - begin) * sizeof(T));
        });
        if (const int64_t lost = exchange.meet()) return lost;
        const T* parts[ranks];
        for (int64_t rank = 0; rank < ranks; ++rank) parts[rank] = static_cast<const T*>(exchange.piece(rank));
        share_tiles(count, [&](int64_t begin, int64_t end) {
            for_each_vector(end - begin, [&](int64_t i, auto lanes) {
                store(out + start + begin + i, tree_sum<ranks>(parts, begin + i, lanes), lanes);
            });
        });
    }
    return 0;
}

// Bytes [begin, end) of what a rank gives, or takes.
struct Stretch {
    int64_t begin, end;
};

// Of what `from` gives, in the order of those that it is for, those for `to`; counts [ranks, ranks] of rows.
inline Stretch given(const int64_t* counts, int64_t ranks, int64_t from, int64_t to, int64_t row_bytes) {
    int64_t begin = 0;
    for (int64_t rank = 0; rank < to; ++rank) begin += counts[from * ranks + rank];
    return {begin * row_bytes, (begin + counts[from * ranks + to]) * row_bytes};
}

}  // namespace

// Returns 0, or 1 + the rank that was waited for in vain.
int64_t all_reduce(void* out, const void* x, void* segment, int64_t rank, int64_t size, int64_t dtype) {
    const Exchange exchange(segment, rank);
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        return with_ranks(exchange.ranks(), [&](auto ranks) {
            return all_reduce_of<decltype(ranks)::value>(static_cast<T*>(out), static_cast<const T*>(x), exchange, size);
        });
    });
}

// Of all ranks' x, `rows` runs of so many bytes each: the first run of each, then the second of each, and so on. Returns as
// above.
int64_t all_gather(void* out, const void* x, void* segment, int64_t rank, int64_t rows, int64_t bytes) {
    Exchange exchange(segment, rank);
    const int64_t most = exchange.most_bytes(), total = rows * bytes, ranks = exchange.ranks();
    for (int64_t start = 0; start < total; start += most) {
        const int64_t stop = total - start < most ? total : start + most;
        __builtin_memcpy(exchange.place(), static_cast<const char*>(x) + start, stop - start);
        if (const int64_t lost = exchange.meet()) return lost;
        share(ranks, kElementWork * ranks * (stop - start) / 4, [&](int64_t source) {
            const char* from = static_cast<const char*>(exchange.piece(source));
            for (int64_t at = start; at < stop;) {
                const int64_t row = at / bytes, offset = at % bytes, left = bytes - offset;
                const int64_t count = left < stop - at ? left : stop - at;
                __builtin_memcpy(static_cast<char*>(out) + (row * ranks + source) * bytes + offset, from, count);
                from += count, at += count;
            }
        });
    }
    return 0;
}

// Each rank's rows to those that they are for: out has those for this rank, in the order of ranks that they come from. Row i of
// counts says how many rank i gives to each. Returns as above.
int64_t all_to_all(void* out, const void* x, void* segment, const int64_t* counts, int64_t rank, int64_t row_bytes) {
    Exchange exchange(segment, rank);
    const int64_t size = exchange.most_bytes(), ranks = exchange.ranks();
    const int64_t own = given(counts, ranks, rank, ranks - 1, row_bytes).end;
    int64_t most = 0;
    for (int64_t source = 0; source < ranks; ++source) {
        const int64_t total = given(counts, ranks, source, ranks - 1, row_bytes).end;
        most = total > most ? total : most;
    }
    for (int64_t start = 0; start < most; start += size) {
        const int64_t left = own - start < size ? own - start : size;
        if (left > 0) __builtin_memcpy(exchange.place(), static_cast<const char*>(x) + start, left);
        if (const int64_t lost = exchange.meet()) return lost;
        char* to = static_cast<char*>(out);
        for (int64_t source = 0; source < ranks; ++source) {
            const Stretch all = given(counts, ranks, source, rank, row_bytes);
            const int64_t begin = all.begin > start ? all.begin : start;
            const int64_t end = all.end < start + size ? all.end : start + size;
            if (begin < end) {
                const char* from = static_cast<const char*>(exchange.piece(source)) + begin - start;
                __builtin_memcpy(to + begin - all.begin, from, end - begin);
            }
            to += all.end - all.begin;
        }
    }
    return 0;
}

}}  // namespace quire::QUIRE_ISA
