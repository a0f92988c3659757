"""Configure how numbers are computed."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ppo_repro.base.mode import Mode, Precision
from ppo_repro.config.section import FIXED, Index, Section

Context = Annotated[int, Field(ge=2, le=32768)]


class NumericsMode(Section):
    """The mode of the numerics."""

    mode: Annotated[Mode, FIXED] = Field(
        "deterministic", description="One written order for every sum, so layout cannot matter, or stock torch."
    )


class NumericsConfig(NumericsMode):
    """The way in which numbers are computed."""

    max_context: Context = Field(description="Longest prompt plus response, tokens; it changes no number.")
    precision: Precision = Field(
        "highest", description="Products of linear layers in deterministic numerics: float32, or integers of 13 bits."
    )

    @model_validator(mode="after")
    def _precision_of_our_own(self) -> Self:
        if self.mode == "native" and self.precision != "highest":
            raise ValueError("precision = high needs mode = deterministic; native numerics have torch's precision")
        return self


class RunNumericsConfig(NumericsConfig):
    """The way in which numbers are computed, and whether a run measures their accuracy."""

    accuracy_sequences: Index = Field(
        4, description="Sequences whose log-probs a deterministic run compares with float64 at its start; 0 for none."
    )
    cross_check: Index = Field(
        64, description="On a GPU: response tokens of each iteration whose log-probs the CPU computes too; 0 for none."
    )
