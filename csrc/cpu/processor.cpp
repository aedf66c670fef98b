// SPDX-License-Identifier: Apache-2.0
// Prints the instruction sets that this processor runs, best first, one a line: CMake compiles for the first that the
// compiler knows (QUIRE_ISAS=native).

#include <cstdio>

#include "processor.h"

int main() {
    for (const quire::InstructionSet& isa : quire::instruction_sets) {
        if (!isa.missing()) std::puts(isa.name);
    }
}
