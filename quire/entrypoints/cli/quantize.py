# SPDX-License-Identifier: Apache-2.0
"""`quire quantize`: write a checkpoint with weights of a few bits."""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--method", required=True, metavar="rtn|gptq|awq|awq-gptq", help="Quantization algorithm.")
@click.option("--output", type=PATH, required=True, help="A new directory for the checkpoint.")
@click.option(
    "--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Bits per weight."
)
@click.option(
    "--group-size",
    type=click.Choice(["auto", "32", "64", "128"]),
    default="auto",
    show_default=True,
    help="Inputs that share a scale; auto: 128, or less where that does not divide a layer's inputs.",
)
@click.option(
    "--symmetric/--asymmetric", default=True, show_default=True, help="Without or with zero points."
)
@click.option(
    "--act-order/--no-act-order",
    default=None,
    help="gptq, awq-gptq: large inputs first.  [default: act-order]",
)
@click.option(
    "--calibration",
    type=PATH,
    metavar="FILE",
    help="Texts for all but rtn.  [default: a text in the package]",
)
@click.option(
    "--num-sequences",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Calibration sequences.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Maximum tokens per calibration sequence.",
)
@click.option("--revision", help="Revision of a Hugging Face model.")
@click.option("--download-dir", help="Cache directory for Hugging Face models.")
def quantize(
    model: str,
    method: str,
    output: Path,
    bits: str,
    group_size: str,
    symmetric: bool,
    act_order: bool | None,
    calibration: Path | None,
    num_sequences: int,
    sequence_length: int,
    revision: str | None,
    download_dir: str | None,
) -> None:
    """Quantize the linear layers of MODEL and write it in the layout of compressed-tensors.

    rtn rounds to nearest with searched scales; gptq, awq and awq-gptq use the layers' inputs on calibration
    texts.
    """
    from quire.engine.core_start import openmp_spin_count

    with openmp_spin_count():  # torch threads that spin between matmuls slow down the kernels' threads
        from quire.config import EngineConfig
        from quire.quantize.grid import AUTO, IntegerGrid
        from quire.quantize.recipe import Recipe
        from quire.quantize.run import quantize_checkpoint

    grid = IntegerGrid(int(bits), AUTO if group_size == "auto" else int(group_size), symmetric)
    recipe = Recipe(method, grid, calibration, num_sequences, sequence_length, act_order)
    where = {"revision": revision, "download_dir": download_dir}
    given = {name: value for name, value in where.items() if value is not None}
    config = EngineConfig.from_args(model=model, device="cpu", matmul_precision="highest", **given)
    used = quantize_checkpoint(config, recipe, output)
    click.echo(
        f"{output}: {method}, {bits} bits, groups of {used.group_size}. Serve it: quire serve {output}"
    )
