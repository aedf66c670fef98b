#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles the C++ kernels in a folder that keeps what did not change, and puts the library into the source tree:
#   tools/kernels.sh native|all|'LIST;OF;SETS' FOLDER
# Without a C++ compiler it says so and succeeds: quire then runs on its torch reference kernels.
set -eu
cd "$(dirname "$0")/.."
isas=$1 folder=$2

compiler=
for name in ${CXX:-c++ g++ clang++}; do
  if command -v "$name" > /dev/null; then compiler=$name; break; fi
done
if [ -z "$compiler" ]; then
  echo 'no C++ compiler found: quire will run on slower torch kernels (Debian: apt install g++, then make install)' >&2
  exit 0
fi

# A folder that was copied or moved with its tree has paths of another place, which CMake refuses.
home=CMAKE_HOME_DIRECTORY:INTERNAL=
grep -qsF -e "$home$PWD/csrc" -e "$home$(pwd -P)/csrc" "$folder/CMakeCache.txt" || rm -rf "$folder"
# A folder stays with the generator that it began with.
generator=
if [ ! -e "$folder/CMakeCache.txt" ] && command -v ninja > /dev/null; then generator=-GNinja; fi
jobs=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
echo "compiling the kernels ($isas) with $compiler, $jobs files at a time; minutes if all are new"
cmake -S csrc/cpu -B "$folder" $generator "-DQUIRE_ISAS=$isas" > "$folder.log" 2>&1 || { cat "$folder.log" >&2; exit 1; }
grep -A3 'CMake Warning' "$folder.log" >&2 || true
cmake --build "$folder" --parallel "$jobs"
cmake --install "$folder" --prefix . > /dev/null
