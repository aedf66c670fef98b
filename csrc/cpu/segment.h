// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of one host share: where each puts a piece of its data for all to read, and where they wait for each
// other. quire/distributed/shared_memory.py makes it, and states its form, too.

#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t kMostRanks = 8;

struct Segment;

// What one rank does with a segment. All ranks exchange equally many pieces of equal sizes.
class Exchange {
public:
    Exchange(void* segment, int64_t rank);

    int64_t ranks() const;
    int64_t most_bytes() const;  // of a piece

    // Where this rank puts its next piece.
    void* place() const;

    // Publishes that piece; returns 0 once those of the others can be read, or 1 + the rank that did not come, and so from
    // then on. Work on another piece may begin at once: no rank waits for readers.
    int64_t meet();

    // A rank's piece of the last meeting, until the next one.
    const void* piece(int64_t rank) const;

private:
    Segment* segment_;
    int64_t rank_;
};

}  // namespace quire
