"""A plan as one HTML file that needs nothing else: no network, no library, no script."""

from __future__ import annotations

from pathlib import Path

from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import Profile
from autobalance.report.bars import memory_bars
from autobalance.report.block_table import block_table
from autobalance.report.curve import memory_curves
from autobalance.report.gantt import gantt
from autobalance.report.markup import Markup, element, joined
from autobalance.report.names import device_title
from autobalance.report.plan_table import held_by
from autobalance.report.replayed import profile_of
from autobalance.report.style import STYLE
from autobalance.report.waterfall import waterfall
from autobalance.report.words import SAME, fit_line, format_value, proof, schedule_line, with_host_step
from autobalance.units import format_size, format_time

_FEW = 8  # devices that a list shows one below the other


def write_page(plan: Plan, path: str | Path, profile: Profile | None = None) -> Path:
    """Write a plan as a page.

    Example:
        >>> write_page(plan, "plan.html")

    Args:
        plan: the plan.
        path: of the file.
        profile: that the plan was made from; None: the plan's own, where it has one.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
        ValueError: the profile is not the plan's.
    """
    target = Path(path)
    target.write_text(page(plan, profile_of(plan, profile)), encoding="utf-8")
    return target


def page(plan: Plan, profile: Profile | None) -> str:
    """The page's text.

    Example:
        >>> page(plan, plan.profile)

    Args:
        plan: the plan.
        profile: that it was made from; None: not at hand, which the page says.
    """
    heading = f"{len(plan.blocks)} blocks on {_devices(plan)}"
    head = joined(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"Plan: {heading}"),
        element("style", Markup(STYLE)),
    )
    main = element(
        "main",
        element("h1", heading),
        element("p", _lead(plan), class_="lead"),
        _cards(plan),
        _section("Peak of each device against its budget", memory_bars(plan)),
        _section("What is where", _places(plan)),
        _section("Timeline of one step", gantt(plan)),
        _section("Memory over time", _curves(plan, profile)),
        _section(f"Lower bounds of the {plan.objective}", waterfall(plan)),
        _list("Advice", plan.advice),
        _section("Blocks", block_table(plan)),
        _list("Notes", plan.notes),
        element("footer", "Made by autobalance. 1 GiB is 1,073,741,824 B. Point at a bar for exact figures."),
    )
    document = element("html", element("head", head), element("body", main), lang="en")
    return f"<!doctype html>\n{document}\n"


def _devices(plan: Plan) -> str:
    names = {device.name for device in plan.devices}
    several = f"{len(plan.devices)} devices" if len(plan.devices) > 1 else "1 device"
    return f"{several} ({names.pop()})" if len(names) == 1 and plan.devices[0].name != "device 0" else several


def _lead(plan: Plan) -> str:
    return f"Policy {plan.policy}. " + (f"Batch: {plan.batch}. " if plan.batch else "") + f"{_sentence(plan)}."


def _sentence(plan: Plan) -> str:
    line = schedule_line(plan)
    return line[0].upper() + line[1:]


def _cards(plan: Plan) -> Markup:
    tightest = max(range(len(plan.devices)), key=plan.uses.__getitem__)
    told = fit_line(plan).partition(": ")[2]
    cards = [
        _card(*(("Fits", told, "good") if plan.fits else ("Does not fit", told, "bad"))),
        _card(
            "Optimal" if plan.optimal else f"Gap {plan.gap:.1%}" if plan.gap > SAME else "Gap below 0.1%",
            f"{plan.objective} {format_value(plan, plan.value)}{with_host_step(plan)}, {_proof(plan)}",
            "good" if plan.optimal else "",
        ),
        _card(
            format_time(plan.step_time) if plan.step_time else "No times",
            "predicted for one step, without the optimizer's" if plan.step_time else "the profile has no times",
        ),
        _card(
            f"{plan.uses[tightest]:.1%}",
            f"largest use of a budget: {format_size(plan.peaks[tightest])} of {format_size(plan.budgets[tightest])}",
        ),
    ]
    return element("div", *cards, class_="cards")


def _proof(plan: Plan) -> str:
    return "less is impossible for plans of this kind" if plan.optimal and plan.gap <= SAME else proof(plan)


def _card(figure: str, words: str, class_: str = "") -> Markup:
    return element("div", element("b", figure), element("span", words), class_=f"card {class_}".strip())


def _places(plan: Plan) -> Markup:
    items = (
        element("li", element("b", device_title(index, device.name)), f": {held_by(plan, index) or 'nothing'}")
        for index, device in enumerate(plan.devices)
    )
    return element("ul", *items, class_="plain many" if len(plan.devices) > _FEW else "plain")


def _curves(plan: Plan, profile: Profile | None) -> Markup:
    if profile is None:
        words = (
            "The profile that this plan was made from is not at hand: a plan read from a file does not bring it. "
            "Give it as plan.report(path, profile=profile) to see the memory over the step here."
        )
        return element("p", words, class_="note")
    return memory_curves(plan, profile)


def _section(heading: str, content: Markup) -> Markup:
    return element("section", element("h2", heading), content)


def _list(heading: str, lines: tuple[str, ...]) -> Markup:
    if not lines:
        return Markup()
    return _section(heading, element("ul", *(element("li", line) for line in lines), class_="plain"))
