"""An answer on the screen: its reasoning dimmed and apart from the rest."""

from __future__ import annotations

import click


class AnswerPrinter:
    """Prints one answer as it comes. Dimming is for terminals: elsewhere click leaves it out."""

    def __init__(self) -> None:
        self._thinks = False
        self._last = ""

    def thought(self, text: str) -> None:
        if text:
            self._thinks = True
            self._echo(text, dim=True)

    def said(self, text: str) -> None:
        if text and self._thinks:
            self._thinks = False
            self._echo("\n\n" if not self._last.endswith("\n") else "\n")
        self._echo(text)

    def end(self) -> None:
        click.echo()

    def _echo(self, text: str, *, dim: bool = False) -> None:
        self._last = text or self._last
        click.echo(click.style(text, dim=True) if dim else text, nl=False)
