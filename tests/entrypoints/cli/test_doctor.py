# SPDX-License-Identifier: Apache-2.0
"""`quire doctor` on this machine, and its reports of broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli import doctor
from quire.entrypoints.cli import doctor as doctor_module
from quire.entrypoints.cli.doctor import (
    SECTIONS,
    DoctorProblem,
    ReportSection,
    instruction_set_facts,
    native_library_section,
    node_facts,
    openmp_problems,
    python_problems,
    report,
    torch_problems,
)
from quire.entrypoints.cli.main import main
from quire.kernels import ops
from quire.kernels.cpu import library
from quire.platforms import Host


def test_sections_of_this_machine() -> None:
    sections = {section.title: section for section in (make() for make in SECTIONS)}
    assert sections["Machine"].facts["cores"].split()[0].isdigit()
    assert any(name.startswith("NUMA node ") for name in sections["Machine"].facts)
    assert sections["Versions"].facts["torch"].startswith("2.")
    assert not sections["Versions"].problems
    assert set(sections["Kernels (float32 on the CPU)"].facts) == set(ops.TABLE)
    assert library.status() == sections["Native library"].facts["state"]
    loaded = library.loaded()
    assert loaded is None or sections["Native library"].facts[loaded.isa] == "used"
    without_graphs = sections["Recorded kernel graphs (decode steps on the CPU)"].facts["not recorded"]
    assert "linear" in without_graphs
    assert loaded is None or "packed_linear" not in without_graphs
    assert sections["OpenMP"].facts


def test_a_new_process_has_one_openmp_runtime() -> None:
    program = [sys.executable, "-m", "quire.entrypoints.cli.main", "doctor", "--json"]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    (section,) = (section for section in json.loads(done.stdout) if section["title"] == "OpenMP")
    assert not section["problems"]


def test_text_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    sections = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    problems = [problem for section in sections for problem in section["problems"]]
    assert code == (1 if problems else 0)
    assert all(section["title"] in text for section in sections)
    assert all(problem["hint"] in text for problem in problems)
    assert len(text.splitlines()) < 70
    assert main(["doctor", "--all"]) == code
    whole = capsys.readouterr().out
    assert all(f"  {op} " in whole for op in ops.TABLE)


def test_report_ends_with_the_problems() -> None:
    fine = ReportSection("Machine", {"CPU": "x"})
    broken = ReportSection(
        "Native library", {"state": "missing"}, [DoctorProblem("it was not built", "install g++")]
    )
    assert report([fine])[-1] == "Nothing is wrong."
    assert report([fine, broken])[-2:] == ["Wrong (1):", "  it was not built\n    hint: install g++"]


def test_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "loaded", lambda: None)
    section = native_library_section()
    assert section.problems[0].what == section.facts["state"]
    assert "C++ compiler" in section.problems[0].hint


def test_each_instruction_set_is_used_or_has_a_reason() -> None:
    missing = {"amx": "the processor lacks AMX", "avx512": None, "avx2": None}
    assert instruction_set_facts("avx512", missing) == {
        "amx": "the processor lacks AMX",
        "avx512": "used",
        "avx2": "not used: avx512 is chosen",
    }


def test_unknown_instruction_set_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("QUIRE_CPU_ISA is 'mmx'; this build on this CPU supports: auto, portable")

    monkeypatch.setattr(library, "loaded", refuse)
    monkeypatch.setattr(library, "status", refuse)
    (problem,) = native_library_section().problems
    assert "QUIRE_CPU_ISA is 'mmx'" in problem.what
    assert problem.hint == "correct or unset QUIRE_CPU_ISA"


def test_missing_demo_model_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "DEMO_MODEL", "/no/such/model")
    section = doctor_module.demo_model_section()
    assert section.facts == {"directory": "missing"}
    assert "quire serve MODEL" in section.problems[0].hint


def test_versions() -> None:
    assert not python_problems((3, 11))
    assert not python_problems((3, 13))
    assert python_problems((3, 10))[0].hint == "use Python 3.11 to 3.14"
    assert python_problems((3, 15))
    assert not torch_problems("2.11.0+cu130")
    assert not torch_problems("3.0.0a1")
    assert "2.9.1 is too old" in torch_problems("2.9.1")[0].what
    assert torch_problems(None)[0].what == "torch is not installed"


def test_two_openmp_runtimes_are_a_problem() -> None:
    assert not openmp_problems([])
    assert not openmp_problems(["/a/libgomp.so.1"])
    assert (
        "/a/libgomp.so.1 and /b/libiomp5.so" in openmp_problems(["/a/libgomp.so.1", "/b/libiomp5.so"])[0].what
    )


def test_machine_from_proc(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 fma\nflags : avx512f\n"
    )
    (tmp_path / "meminfo").write_text("MemTotal:       2097152 kB\nMemAvailable:   1048576 kB\n")
    (tmp_path / "self" / "maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 123   /opt/a dir/libgomp.so.1\n"
        "7f02-7f03 r--p 00000000 08:01 123   /opt/a dir/libgomp.so.1\n"
        "7f04-7f05 r-xp 00000000 08:01 124   /opt/libiomp5.so\n"
        "7f06-7f07 r-xp 00000000 08:01 125   /opt/libomptarget_not.txt\n"
        "7f08-7f09 rw-p 00000000 00:00 0     [heap]\n"
    )
    assert doctor.cpu_model(tmp_path) == "Fast CPU"
    assert doctor.instruction_sets(tmp_path) == ["avx2", "fma"]
    assert doctor.memory_gib(tmp_path) == (2.0, 1.0)
    assert doctor.openmp_runtimes(tmp_path) == ["/opt/a dir/libgomp.so.1", "/opt/libiomp5.so"]


def test_machine_without_proc(tmp_path: Path) -> None:
    assert doctor.cpu_model(tmp_path)
    assert doctor.instruction_sets(tmp_path) == []
    assert doctor.memory_gib(tmp_path) is None
    assert doctor.openmp_runtimes(tmp_path) == []
    assert doctor.num_cores() >= 1


def test_nodes_with_their_processors_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert node_facts(Host(tmp_path)) == {
        "NUMA node 0": "processors 0-3 (4 physical cores), unknown of memory",
    }
    for number, cpus in ((0, "0,2"), (1, "1,3,5")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {2 * 2**20} kB\nNode 0 MemFree: 1 kB\n"
        )
    assert node_facts(Host(tmp_path)) == {
        "NUMA node 0": "processors 0,2 (2 physical cores), 2.0 GiB of memory",
        "NUMA node 1": "processors 1,3 (2 physical cores), 2.0 GiB of memory",
    }
