// SPDX-License-Identifier: Apache-2.0
// AMX: tiles of up to 16 rows of 64 bytes, and one instruction that multiplies two of them and adds to a third.
//
// A panel of weights is a row of tiles as it lies in memory: 16 rows, each of the four (two) k of 16 outputs that stand
// together. So is a tile of packed activations, [rows][64 bytes].

#pragma once

#include "linear.h"

namespace quire { namespace QUIRE_ISA { namespace {

// A tile's rows and k, and that there is no such tile (0).
constexpr int64_t kTileRows = 16, kTileBytes = 64;

// The shapes of the eight tiles, as the instruction that sets them reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t tile_rows, int64_t bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

// What tiles are loaded from has been written: compilers do not know how much of it the instructions read.
inline void written() { asm volatile("" ::: "memory"); }

inline void use(const TileShapes& shapes) {
    written();
    _tile_loadconfig(&shapes);
}

}}}  // namespace quire::QUIRE_ISA
