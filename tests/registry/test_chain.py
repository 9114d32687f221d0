"""The chain: what is found where, which patch is at which box, and the page."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from afdpatch.registry import (
    Lock,
    Manifest,
    ManifestError,
    SourceTree,
    Verdict,
    identify,
    lock_path,
    packaged_manifest,
    verify,
)
from afdpatch.registry.chain import Chain, Map, trace
from afdpatch.registry.reports.map_html import map_html
from tests.registry.conftest import COMMIT, World

MANIFEST = packaged_manifest("afdpatch.manifests", "afd")
FORGE = "https://forge.example/owner/project"


def chain_data() -> dict[str, Any]:
    return {
        "chain": "afd",
        "title": "From A to B",
        "about": "A chain.",
        "processes": {"front": {"title": "Front", "about": "first"}, "back": {"title": "Back", "about": "then"}},
        "boxes": [
            {
                "id": "free",
                "title": "Free",
                "process": "front",
                "symbols": ["PKG.core:free"],
                "does": "Is free.",
                "roles": {"red": "runs", "blue": "idle"},
            },
            {"id": "side", "beside": "free", "title": "Side", "process": "front", "symbols": ["PKG.core:helper"]}
            | {"does": "Helps."},
            {"id": "engine", "title": "Engine", "process": "back", "symbols": ["PKG.core:Engine"], "does": "Runs."},
            {"id": "make", "title": "Make", "process": "back", "symbols": ["PKG.core:Engine.make"], "does": "Makes."},
        ],
    }


@pytest.fixture
def pinned(world: World) -> World:
    world.declare(
        world.entry(relies=["PKG.core:helper", "PKG.core:Engine.make"], why="Because <b>&amp;</b>."),
        world.entry("PKG.core:Engine.run"),
        world.entry("PKG.core:Engine.make"),
        world.entry("PKG.core:LIMIT", id="core.limit", kind="official", when="always"),
        repository=FORGE,
    )
    assert world.pin() == 0
    return world


def declared(world: World, data: dict[str, Any]) -> Path:
    path = world.manifest.with_name("afd.chain.yaml")
    path.write_text(world.text(yaml.safe_dump(data, sort_keys=False)), encoding="utf-8")
    return path


def traced(world: World, data: dict[str, Any] | None = None) -> Map:
    manifest = Manifest.read(world.manifest)
    tree = SourceTree.at(world.package, world.site)
    lock = Lock.read(lock_path(world.manifest, manifest.version))
    report = verify(lock, tree, identify(tree), manifest=manifest)
    return trace(Chain.read(declared(world, data or chain_data())), report, tree)


def test_a_patch_is_at_the_narrowest_box_and_at_no_other(pinned: World) -> None:
    found = traced(pinned)
    hooks = {station.box.id: [hook.entry.id for hook in station.hooks] for station in found.stations}
    assert hooks == {
        "free": ["core.free"],
        "side": [],
        "engine": ["core.engine-run"],
        "make": ["core.engine-make"],
    }
    assert [hook.entry.id for hook in found.elsewhere] == ["core.limit"]
    relied = {station.box.id: station.relied_on_by for station in found.stations}
    assert relied == {"free": (), "side": ("core.free",), "engine": (), "make": ("core.free",)}


def test_a_name_that_begins_like_a_box_s_is_not_in_it(pinned: World) -> None:
    data = chain_data()
    data["boxes"][3]["symbols"] = ["PKG.core:LIM"]
    found = traced(pinned, data)
    assert found.stations[3].hooks == () and "core.limit" in [hook.entry.id for hook in found.elsewhere]


def test_the_spine_has_the_boxes_of_the_chain_with_those_beside_them(pinned: World) -> None:
    shape = [(own.box.id, [other.box.id for other in side]) for own, side in traced(pinned).spine]
    assert shape == [("free", ["side"]), ("engine", []), ("make", [])]


def test_a_place_is_the_definition_s_line_and_its_link_is_of_the_pinned_commit(pinned: World) -> None:
    lines = (pinned.site / pinned.package / "core.py").read_text().splitlines()
    (place,) = traced(pinned).stations[0].places
    assert place.line is not None and lines[place.line - 1].startswith("def free(")
    assert place.file == f"{pinned.package}/core.py"
    assert place.link == f"{FORGE}/blob/{COMMIT}/{place.file}#L{place.line}"
    pinned.core('"""The module', '"""\n\nThe module')
    (moved,) = traced(pinned).stations[0].places
    assert moved.line == place.line + 2
    assert moved.link == f"{FORGE}/blob/{COMMIT}/{place.file}", "the commit doesn't have it at that line"


def test_what_is_absent_is_shown_as_absent_everywhere(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    from afdpatch.registry.reports.map_text import print_map
    from afdpatch.registry.reports.text import console

    pinned.core("def free", "def freed")
    found = traced(pinned)
    (place,) = found.stations[0].places
    assert place.file is None and place.line is None and place.link is None
    assert "has no 'free'" in (place.absent or "")
    (hook,) = found.stations[0].hooks
    assert hook.verdict is Verdict.ABSENT and hook.place.file is None
    print_map(found, console())
    text = capsys.readouterr().out
    assert text.count("free  absent: ") == 2, "the box's symbol and the patch's target"
    assert "core.free  wrap, role, absent" in text
    page = map_html(found)
    assert re.search(r'<article class="box broken" id="free">.*?class="absent">absent: ', page, re.DOTALL)
    assert found.as_dict()["boxes"][0]["symbols"][0]["absent"] == place.absent


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("boxes"), "not a chain"),
        (lambda data: data["boxes"][0].pop("does"), "key 'does' is missing"),
        (lambda data: data["boxes"][0].update(colour="red"), "unknown key 'colour'"),
        (lambda data: data["boxes"][0].update(symbols=[]), "module:Qualified.name"),
        (lambda data: data["boxes"][0].update(symbols=["PKG.core.free"]), "module:Qualified.name"),
        (lambda data: data["boxes"][0].update(title=3), "texts"),
        (lambda data: data["boxes"][0].update(process="middle"), "unknown process"),
        (lambda data: data["boxes"][2].update(id="free"), "used twice"),
        (lambda data: data["boxes"][1].update(beside="engine"), "above it"),
        (lambda data: data["boxes"][2].update(beside="side"), "a box of the chain itself"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused_by_name(world: World, change: Any, says: str) -> None:
    data = chain_data()
    change(data)
    path = declared(world, data)
    with pytest.raises(ManifestError, match=re.escape(str(path))) as caught:
        Chain.read(path)
    assert says in str(caught.value)


def test_no_file_and_no_yaml_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for content in (None, "a: ["):
        path = tmp_path / "x.chain.yaml"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(ManifestError, match="--chain"):
            Chain.read(path)


# ---- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page refers to, its ids, and the tags that were not closed."""

    VOID = ("meta", "wbr", "path", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: Counter[str] = Counter()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action", "style") or name.startswith("on"):
                self.loads.append(f"{tag} {name}={value}")
            elif name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_loads_nothing_and_its_links_lead_to_the_commit_or_to_itself(pinned: World) -> None:
    text = map_html(traced(pinned))
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"@import|url\(|@font-face", text)
    inner = [link for link in page.links if link.startswith("#")]
    assert {link[1:] for link in inner} == set(page.ids) == {"free", "side", "engine", "make"}
    outer = set(page.links) - set(inner)
    assert outer and all(link.startswith((f"{FORGE}/blob/{COMMIT}/", f"{FORGE}/tree/{COMMIT}")) for link in outer)


def test_the_page_has_each_box_and_each_patch_once(pinned: World) -> None:
    text = map_html(traced(pinned))
    page = Page(text)
    assert page.tags["article"] == 4 and len(page.ids) == len(set(page.ids))
    patches = re.findall(r"<summary><b>(.*?)</b>", text)
    assert sorted(patches) == ["core.engine-make", "core.engine-run", "core.free", "core.limit"]
    assert text.count("In no box of the chain") == 1


def test_the_page_escapes_what_the_manifest_says(pinned: World) -> None:
    text = map_html(traced(pinned))
    assert "Because &lt;b&gt;&amp;amp;&lt;/b&gt;." in text and "<b>&amp;</b>" not in text


def test_the_page_is_for_light_and_dark_and_for_a_phone(pinned: World) -> None:
    text = map_html(traced(pinned))
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    colours = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    light, dark = (set(re.findall(r"--[a-z-]+(?=:)", part)) for part in colours)
    assert light == dark, "each colour has its dark one"
    assert {name for name in re.findall(r"var\((--[a-z-]+)\)", text)} <= light


# ---- afdpatch's own --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Map:
    manifest = Manifest.read(MANIFEST)
    try:
        tree = SourceTree.installed(manifest.package)
    except FileNotFoundError:
        pytest.skip(f"no {manifest.package} here")
    if identify(tree, manifest.distributions).version != manifest.version:
        pytest.skip(f"another {manifest.package} here")
    lock = Lock.read(lock_path(MANIFEST, manifest.version))
    report = verify(lock, tree, identify(tree, manifest.distributions), manifest=manifest)
    return trace(Chain.read(MANIFEST.with_name("afd.chain.yaml")), report, tree)


def test_every_patch_of_afdpatch_is_at_one_box(own: Map) -> None:
    assert own.elsewhere == ()
    at = Counter(hook.entry.id for station in own.stations for hook in station.hooks)
    assert at == Counter(entry.entry.id for entry in own.report.entries)


def test_every_symbol_of_the_chain_is_where_its_name_is_defined(own: Map) -> None:
    tree = SourceTree.installed(own.report.lock.manifest.package)
    for station in own.stations:
        for place in station.places:
            assert place.file is not None, place.absent
            line = (tree.root / place.file).read_text(encoding="utf-8").splitlines()[(place.line or 0) - 1]
            name = place.symbol.rpartition(":")[2].rpartition(".")[2]
            assert re.match(rf"\s*(async def|def|class) {name}\b", line)
            assert place.link and place.link.endswith(f"{own.report.lock.manifest.commit}/{place.file}#L{place.line}")


def test_each_box_says_what_it_does_in_both_roles(own: Map) -> None:
    for station in own.stations:
        assert list(station.box.roles) == ["attention", "ffn"], station.box.id


def test_the_chain_goes_from_the_api_server_to_the_ffn(own: Map) -> None:
    ids = [station.box.id for station, _ in own.spine]
    order = ["api-server", "async-llm", "engine-core", "executor", "worker", "runner", "model", "decoder-layer", "ffn"]
    assert [item for item in ids if item in order] == order
    assert {"http-app", "loader"} <= {station.box.id for station in own.stations}
