"""A chain as one page of HTML: style and arrows are in it, nothing else is loaded; links lead to the pinned commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from afdpatch.registry.chain import Hook, Map, Place, Station
from afdpatch.registry.report import Verdict
from afdpatch.registry.reports.map_style import STYLE

_ARROW = (
    '<svg class="arrow{more}" viewBox="0 0 16 24" aria-hidden="true">'
    '<path d="M8 1v20M3 16l5 5 5-5" fill="none" stroke="currentColor" stroke-width="1.6"/></svg>'
)


def map_html(map: Map) -> str:
    """The page."""
    manifest = map.report.lock.manifest
    title = f"{manifest.package} {manifest.version}: {map.chain.title}"
    roles = list(dict.fromkeys(role for station in map.stations for role in station.box.roles))
    processes = []
    for process, group in groupby(map.spine, key=lambda pair: pair[0].box.process):
        processes.append(_process(map, process, list(group), roles))
    body = [
        "<main>",
        f"<h1>{escape(map.chain.title)}</h1>",
        f"<p>{escape(map.chain.about)}</p>",
        _facts(map),
        _overview(map),
        _ARROW.format(more=" between").join(processes),
        _elsewhere(map.elsewhere),
        _footer(),
        "</main>",
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(part for part in body if part) + "\n</body>\n</html>\n"


def _facts(map: Map) -> str:
    report, manifest = map.report, map.report.lock.manifest
    commit = f"<code>{escape(manifest.commit[:12])}</code>"
    if manifest.repository is not None:
        commit = _anchor(f"{manifest.repository}/tree/{manifest.commit}", commit)
    absent = sum(place.file is None for station in map.stations for place in station.places)
    symbols = sum(len(station.places) for station in map.stations)
    facts = [
        ("At hand", escape(f"{manifest.package} {report.identity}")),
        ("Pinned", f"{escape(manifest.version)}, commit {commit}"),
        ("Patches", f"{len(report.entries)}, {_verdict(report.verdict)}"),
        ("Symbols", f"{symbols}, {absent} absent"),
    ]
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{rows}</dl>'


def _overview(map: Map) -> str:
    """The chain in a strip: a link for each box, with the number of its patches."""
    parts = []
    for process, group in groupby(map.spine, key=lambda pair: pair[0].box.process):
        steps = "".join(
            "<li>"
            + "".join(_chip(station, "" if index == 0 else " side") for index, station in enumerate((own, *side)))
            + "</li>"
            for own, side in group
        )
        parts.append(f"<p>{escape(map.chain.processes[process][0])}</p><ol>{steps}</ol>")
    return f'<nav aria-label="The chain">{"".join(parts)}</nav>'


def _chip(station: Station, side: str) -> str:
    count = len(station.hooks)
    state = " broken" if _broken(station) else " hooked" if count else ""
    patches = f' <i title="{count} at this box">{count}</i>' if count else ""
    return f'<a class="chip{side}{state}" href="#{escape(station.box.id)}">{escape(station.box.title)}{patches}</a>'


def _broken(station: Station) -> bool:
    return any(place.file is None for place in station.places) or any(
        hook.verdict is not Verdict.OK for hook in station.hooks
    )


def _process(
    map: Map, process: str, stations: Iterable[tuple[Station, tuple[Station, ...]]], roles: Sequence[str]
) -> str:
    title, about = map.chain.processes[process]
    boxes = []
    for station, beside in stations:
        side = "".join(_box(other, roles) for other in beside)
        boxes.append(_box(station, roles) + (f'\n<div class="beside">{side}</div>' if side else ""))
    inner = f"\n{_ARROW.format(more='')}\n".join(boxes)
    return (
        f'<section class="process"><header><h2>{escape(title)}</h2>'
        f'<p class="soft">{escape(about)}</p></header>\n{inner}</section>\n'
    )


def _box(station: Station, roles: Sequence[str]) -> str:
    box = station.box
    state = " broken" if _broken(station) else " hooked" if station.hooks else ""
    places = "".join(f"<li>{_place(place)}</li>" for place in station.places)
    parts = [
        f'<article class="box{state}" id="{escape(box.id)}"><h3>{escape(box.title)}</h3>',
        f'<p class="soft">{escape(box.does)}</p><div class="facets"><ul class="places">{places}</ul>',
    ]
    if box.roles:
        rows = "".join(
            f'<dt class="role-{roles.index(role) % 2}">{escape(role)}</dt><dd>{escape(does)}</dd>'
            for role, does in box.roles.items()
        )
        parts.append(f'<dl class="roles">{rows}</dl>')
    parts.append("</div>")
    parts += [_hook(hook) for hook in station.hooks]
    if station.relied_on_by:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in station.relied_on_by)
        parts.append(f'<p class="relied soft">relied on by {names}</p>')
    return "\n".join([*parts, "</article>"])


def _place(place: Place) -> str:
    name = f"<code>{escape(place.symbol.rpartition(':')[2])}</code>"
    if place.file is None:
        return f'{name}<span class="absent">absent: {escape(place.absent or "")}</span>'
    where = f"<code>{escape(place.file).replace('/', '/<wbr>')}:{place.line}</code>"
    return name + (_anchor(place.link, where) if place.link else where)


def _hook(hook: Hook) -> str:
    entry = hook.entry
    bad = "" if hook.verdict is Verdict.OK else " bad"
    rows = f"<p>{escape(entry.why)}</p><ul class='places'><li>{_place(hook.place)}</li></ul>"
    used = ", ".join(entry.processes) or "every process"
    roles = f"; {', '.join(entry.roles)}" if entry.roles else ""
    rows += f'<p class="tag">{escape(used + roles)}; {escape(entry.path)} path</p>'
    if entry.replacement:
        rows += f'<p class="tag">by <code>{escape(entry.replacement)}</code></p>'
    return (
        f'<details class="patch{bad}"><summary><b>{escape(entry.id)}</b>'
        f'<span class="tag">{escape(entry.kind)}, {escape(entry.when)}</span>{_verdict(hook.verdict)}</summary>'
        f"{rows}</details>"
    )


def _elsewhere(hooks: Sequence[Hook]) -> str:
    if not hooks:
        return ""
    inner = "".join(_hook(hook) for hook in hooks)
    return f'<section class="process"><header><h2>In no box of the chain</h2></header>{inner}</section>'


def _footer() -> str:
    return (
        '<footer class="soft"><p>wrap: a function around the original; replace: ours instead of it; install: something '
        "outside of the package's symbols; official: a place that the package offers, nothing is patched. always: from "
        "the import on; role: once the process's role is known.</p>"
        "<p>In the strip, a number counts the patches at a box; a dashed one hangs beside the chain.</p>"
        "<p>Made by <code>afdpatch map --html</code> from the source, which was read and not imported.</p></footer>"
    )


def _verdict(verdict: Verdict) -> str:
    return f'<span class="verdict {verdict.value}">{verdict.value}</span>'


def _anchor(address: str, inner: str) -> str:
    return f'<a href="{escape(address)}">{inner}</a>'
