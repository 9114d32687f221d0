from __future__ import annotations

from typing import Any

import pytest

from afdpatch.registry import Manifest, ManifestError
from tests.registry.conftest import World


def test_every_key_is_kept_in_the_frozen_form(world: World) -> None:
    entry = world.entry(relies=["PKG.core:helper"], holders=["PKG.user"], path="hot", remove_when="OURS.patches:ready")
    manifest = Manifest.parse(world.data(entry), source="m")
    frozen = manifest.as_dict()
    assert Manifest.parse(frozen, source="frozen") == manifest
    assert frozen["patches"][0]["relies"] == [f"{world.package}.core:helper"]
    assert set(frozen["patches"][0]) >= {"id", "seam", "target", "kind", "why", "remove_when", "holders", "processes"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wy": "typo"}, "unknown key 'wy'"),
        ({"why": None}, "key 'why' is missing"),
        ({"why": " "}, "bad why"),
        ({"kind": "patch"}, "bad kind"),
        ({"when": "sometimes"}, "bad when"),
        ({"path": "warm"}, "bad path"),
        ({"target": "PKG.core.free"}, "bad target"),
        ({"target": "other.core:free"}, "outside of the package"),
        ({"replacement": None}, "a replacement"),
        ({"kind": "official"}, "no replacement"),
        ({"roles": []}, "at least one role"),
        ({"when": "always"}, "no roles"),
        ({"relies": "PKG.core:helper"}, "bad relies"),
        ({"relies": ["PKG.core:helper", "PKG.core:helper"]}, "names something twice"),
        ({"target": "PKG.core:Engine.run", "holders": ["PKG.user"]}, "only a patched function of a module has holders"),
        ({"id": "Upper Case"}, "bad id"),
        ({"remove_when": True}, "bad remove_when"),
    ],
)
def test_a_bad_entry_is_refused_with_file_and_id(world: World, change: dict[str, Any], says: str) -> None:
    entry = {key: value for key, value in (world.entry() | change).items()}
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(world.data(entry), source="the-file.yaml")
    assert says in str(caught.value)
    assert "the-file.yaml: entry" in str(caught.value)
    assert change.get("id", "core.free") in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"version": 1.0}, "quote it"),
        ({"version": "dev"}, "bad version"),
        ({"version": "1.0+cpu"}, "bad version"),
        ({"commit": "abc"}, "bad commit"),
        ({"distributions": []}, "at least one name"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"patches": {}}, "is not a list"),
        ({"patches": ["x"]}, "entry number 1"),
    ],
)
def test_a_bad_header_is_refused(world: World, header: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        Manifest.parse(world.data(**header), source="m")


def test_an_id_used_twice_is_refused(world: World) -> None:
    with pytest.raises(ManifestError, match="used twice"):
        Manifest.parse(world.data(world.entry(), world.entry("PKG.core:helper", id="core.free")), source="m")


def test_two_patches_of_one_target_are_refused_unless_their_roles_never_meet(world: World) -> None:
    one, two = world.entry(), world.entry(id="core.second", roles=["blue"])
    assert len(Manifest.parse(world.data(one, two), source="m").entries) == 2
    with pytest.raises(ManifestError, match=r"'core.free' and 'core.second' both patch"):
        Manifest.parse(world.data(one, two | {"roles": ["blue", "red"]}), source="m")
    always = world.entry(id="core.second", when="always")
    with pytest.raises(ManifestError, match="both patch"):
        Manifest.parse(world.data(one, always), source="m")


def test_what_is_not_yaml_is_refused(world: World) -> None:
    world.manifest.write_text("a: [", encoding="utf-8")
    with pytest.raises(ManifestError, match="not YAML"):
        Manifest.read(world.manifest)
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.read(world.manifest.with_name("none.yaml"))
