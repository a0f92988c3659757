"""Make the section "Tokens" of a run's page."""

from __future__ import annotations

from ppo_repro.analysis.html.markup import element, number
from ppo_repro.analysis.html.page import Section
from ppo_repro.analysis.html.token_area import token_area
from ppo_repro.analysis.report.data.chosen_responses import MAX_TOKENS
from ppo_repro.analysis.report.data.token_view import TokenView


def token_section(view: TokenView, recorded: int) -> Section:
    """Return the section that shows `view`; the run has `recorded` responses."""
    needs = element("noscript", element("p", "The token view needs the script inside this page."))
    shown = number(len(view["responses"]))
    note = (
        f"{shown} of {number(recorded)} responses: in turn those with the largest |old - rollout| difference, the most "
        "clipped token updates, the best score, the worst score (the latest first), and the first "
        f"responses of the first and of the last iteration; at most {number(MAX_TOKENS)} tokens. ppo-repro view "
        "shows every response."
    )
    return Section("tokens", "Tokens", (note,), blocks=(needs, token_area()))
