"""The page of `vitreous serve` in a real browser: every tab, by mouse and by keyboard, wide, narrow, light, dark."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import zoo
from machine import PATIENCE, rare
from pages import DONE, LABELS, LONG, SHOTS, changes, decided, export, maps, photo, pixels, shot
from PIL import Image
from test_dense import Segmenter

import vitreous
from vitreous import Model
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.plot.colour import colour_map
from vitreous.web.engine import Engine, Source

pytestmark = pytest.mark.browser
TABS = ("explain", "compare", "attention", "concepts", "faithfulness", "inside", "features")
FEATURES = "#features .legend span:last-child:not(:empty)"
THREE = "method=cdam&method=gae&method=rollout"


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """A server with tiny models, and with a slow method."""
    names = ["timm ViT", "timm DINOv2 registers", "timm Swin"]
    models = [Model(decided(zoo.network(name)), labels=LABELS, name=name.replace(" ", "-")) for name in names]
    models.append(Model(Segmenter().eval(), cropped((64, 64), *IMAGENET), ["cat", "dog", "bird"], name="segmenter"))
    with pages.dawdling(), pages.serving(Engine([(model, Source("x/y")) for model in models], pages.FREE)) as home:
        yield home


def test_first_visit_is_explained(visit: Callable[..., Any]) -> None:
    page = visit()
    maps(page, 3)  # one method for two targets, one for none
    assert "predicts" in page.locator(".lead").first.inner_text()
    labels = [page.locator(".grid .map").nth(i).get_attribute("aria-label") for i in range(2)]
    assert all("highest at the" in label for label in labels)
    assert "attention" in labels[0] and "centred_lrp for" in labels[1]


def test_the_whole_way(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(THREE)
    page.set_input_files("#file", photo())
    page.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    page.wait_for_selector(".bars .bar >> nth=4")
    assert page.locator("#rail .bar").count() == 5
    maps(page, 5)

    page.locator(".chip button").last.click()  # one target, then another by its bar
    page.locator('#rail .bar[aria-pressed="false"]').first.click()
    maps(page, 5)
    assert page.locator(".grid thead th").count() == 3 and page.locator(".grid tbody th").count() == 2

    page.locator(".grid .map").nth(1).hover(position={"x": 40, "y": 40})
    assert page.locator(".badge:visible").count() == 5
    assert page.locator(".hair:visible").count() == 6  # and on the photo
    before = pixels(page, ".grid canvas")
    page.locator("#strip input").first.fill("30")
    changes(page, ".grid canvas", before)

    with page.expect_download() as figure:
        export(page, "figure")
    with Image.open(figure.value.path()) as drawn:
        assert drawn.format == "PNG" and drawn.width > 500
    export(page, "python")
    page.wait_for_selector("#toast:visible, dialog[open] pre")
    page.keyboard.press("Escape")

    page.click("#tab-attention")
    page.wait_for_selector(".heads .thumb canvas")
    page.wait_for_function("() => document.querySelector('.main .legend span:last-child').textContent")
    before = pixels(page, ".main .map canvas")
    page.locator(".main .map").hover(position={"x": 10, "y": 10})
    changes(page, ".main .map canvas", before)
    before = pixels(page, ".main .map canvas")
    page.keyboard.down("Shift")
    changes(page, ".main .map canvas", before)
    assert "which tokens attend to" in page.locator("#attention .lead").inner_text()
    page.keyboard.up("Shift")
    before = pixels(page, ".rollout .map canvas")
    page.locator(".rollout input").first.fill("70")
    changes(page, ".rollout .map canvas", before)
    page.locator(".heads .thumb").first.click()
    page.wait_for_function("() => document.querySelector('#attention .lead').innerText.includes('Layer 0, head 0')")

    page.click("#tab-faithfulness")
    page.wait_for_selector(".chart .band")
    assert page.locator(".chart .curve").count() == 3
    before = pixels(page, ".holes canvas")
    page.locator(".chart").first.hover(position={"x": 300, "y": 100})
    changes(page, ".holes canvas", before)
    page.locator("#eraser").scroll_into_view_if_needed()
    old = page.locator(".traced").inner_text()
    box = page.locator("#eraser").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 150, steps=8)
    page.mouse.up()
    page.wait_for_function("old => document.querySelector('.traced').innerText !== old", arg=old)
    assert "→" in page.locator(".traced").inner_text()
    page.get_by_role("button", name="Undo").click()
    page.wait_for_function("old => document.querySelector('.traced').innerText === old", arg=old)

    page.click("#tab-concepts")
    page.set_input_files("#example-files", [photo(seed) for seed in (1, 2, 3)])
    page.fill("#concept-name", "stripes")
    page.get_by_role("button", name="Build the concept").click()
    page.wait_for_selector(".concept .legend span:last-child:not(:empty)")
    assert page.locator(".chip").filter(has_text="stripes").count() == 1
    page.click("#tab-explain")
    maps(page, 7)
    shot(page, "journey")
    page.click("#tab-concepts")
    page.get_by_role("button", name="Delete stripes").click()
    page.wait_for_function("() => !document.querySelector('.concept')")

    page.click("#tab-inside")
    page.wait_for_selector(".headbar")
    assert page.locator(".headbar").count() == 6
    page.locator(".headbar").first.click()
    page.wait_for_selector(".headbar.chosen")
    page.wait_for_selector(".triple .legend span:last-child:not(:empty)")
    before = pixels(page, ".triple .map canvas")
    page.locator(".triple .map").nth(2).hover(position={"x": 15, "y": 15})
    changes(page, ".triple .map canvas", before)


def taken(page: Any, kind: str) -> Path:
    """What a button of the export group gives."""
    with page.expect_download() as download:
        export(page, kind)
    assert download.value.suggested_filename.endswith(f".{kind}")
    return Path(download.value.path())


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def names_in(file: Path, tmp_path: Path) -> dict[str, vitreous.Attribution]:
    """Every map of an .npz file, as the library opens it."""
    copy = tmp_path / "taken.npz"  # downloads have no ending
    copy.write_bytes(file.read_bytes())
    with np.load(copy) as held:
        return {name: vitreous.Attribution.load(copy, name) for name in held if name != "provenance"}


@pytest.mark.slow
def test_every_tab_has_an_export(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("method=cdam&method=rollout;discard=0.5&method=rollout&target=3&target=zebra&opacity=40")
    maps(page, 4)
    found = names_in(taken(page, "npz"), tmp_path)
    assert set(found) == {"cdam@3", "cdam@6", "rollout", "rollout:discard=0.5"}
    assert found["rollout:discard=0.5"].options["discard"] == 0.5 and found["cdam@6"].target == "6"
    assert all(one.provenance["model"] == "timm-ViT" for one in found.values())
    check_view(taken(page, "png"), "explain")

    page.click("#tab-attention")
    page.wait_for_function("() => document.querySelector('.rollout .legend span:last-child')?.textContent")
    found = names_in(taken(page, "npz"), tmp_path)
    assert {"attention:layer=2,heads=mean", "attention:layer=0,heads=1"} < set(found)
    assert sum(name.startswith("rollout") for name in found) == 1
    shares = rows_of(taken(page, "csv"))
    assert len(shares) == 3 and abs(sum(float(shares[0][k]) for k in ("cls", "registers", "patches")) - 1) < 1e-4
    check_view(taken(page, "png"), "attention")

    page.click("#tab-faithfulness")
    page.wait_for_selector(".chart .band")
    curves = rows_of(taken(page, "csv"))
    assert {row["method"] for row in curves} == {"cdam", "rollout", "random"}
    assert {row["metric"] for row in curves} == {"deletion"} and {row["better"] for row in curves} == {"lower"}
    assert all(row["least"] and row["most"] for row in curves if row["method"] == "random")
    assert set(names_in(taken(page, "npz"), tmp_path)) == {"cdam@3", "rollout", "rollout:discard=0.5"}
    check_view(taken(page, "png"), "faithfulness")
    with page.expect_download() as download:
        page.locator("#faithfulness").get_by_role("button", name="CSV").first.click()
    listed = rows_of(Path(download.value.path()))
    assert {"dog", "zebra"} <= {row["label"] for row in listed}

    page.click("#tab-inside")
    page.wait_for_selector(".headbar")
    page.wait_for_selector(".triple .legend span:last-child:not(:empty)")
    scores = rows_of(taken(page, "csv"))
    assert len(scores) == 6 and {row["target"] for row in scores} == {"dog"}
    assert "query_key:layer=2,head=mean,token=readout" in names_in(taken(page, "npz"), tmp_path)
    check_view(taken(page, "png"), "inside")

    page.click("#tab-concepts")
    page.set_input_files("#example-files", [photo(1)])
    page.fill("#concept-name", "spots")
    page.get_by_role("button", name="Build the concept").click()
    page.wait_for_selector(".concept .legend span:last-child:not(:empty)")
    (name,) = names_in(taken(page, "npz"), tmp_path)
    assert name.startswith("cdam@concept:spots")
    check_view(taken(page, "png"), "concepts")
    page.get_by_role("button", name="Delete spots").click()
    page.wait_for_function("() => !document.querySelector('.concept')")


def check_view(file: Path, tab: str) -> None:
    """The view as it is drawn: not blank, and with a note of what it shows."""
    with Image.open(file) as drawn:
        assert drawn.format == "PNG" and drawn.width > 800
        told = json.loads(drawn.text["vitreous view"])
        assert told["model"] == "timm-ViT" and told["image"] == "cat" and told["vitreous"] == vitreous.__version__
        assert tab == "explain" or f"tab={tab}" in told["view"]
        assert len(np.unique(np.asarray(drawn.convert("L").resize((64, 64))))) > 20
    if SHOTS:
        shutil.copy(file, Path(SHOTS) / f"taken-{tab}.png")


@pytest.mark.slow
def test_a_concept_is_built_from_the_packaged_examples(visit: Callable[..., Any]) -> None:
    page = visit("tab=concepts", ready=".form")
    page.get_by_role("button", name="Take the packaged examples of coffee").click()
    page.wait_for_function("() => document.querySelectorAll('.examples img').length === 5")
    page.wait_for_function("() => document.getElementById('concept-name').value === 'coffee'")
    page.get_by_role("button", name="Build the concept").click()
    page.wait_for_selector(".concept .legend span:last-child:not(:empty)")
    shot(page, "packaged")
    page.get_by_role("button", name="Delete coffee").click()
    page.wait_for_function("() => !document.querySelector('.concept')")


@pytest.mark.slow
def test_without_concepts_the_tab_offers_one(visit: Callable[..., Any]) -> None:
    page = visit("tab=concepts", ready=".gallery img", wide=1440, high=900)
    page.wait_for_function("() => [...document.querySelectorAll('.gallery img')].every((one) => one.naturalWidth > 0)")
    stage, last = page.locator("#stage").bounding_box(), page.locator(".offer button").bounding_box()
    assert last["y"] + last["height"] - stage["y"] > 0.6 * stage["height"], "the tab is half empty"
    page.focus(".offer button")
    page.keyboard.press("Enter")
    page.wait_for_selector(".concept .legend span:last-child:not(:empty)")
    assert page.locator(".concept b").inner_text() == "coffee" and page.locator(".offer").count() == 0
    page.get_by_role("button", name="Delete coffee").click()
    page.wait_for_selector(".offer")


@pytest.mark.slow
def test_an_unknown_label_is_refused_where_it_is_typed(visit: Callable[..., Any]) -> None:
    page = visit("method=cdam")
    page.expected.append("status of 422")
    chosen = page.locator(".chip").all_inner_texts()
    for words in ("zebrra", "zebrra - dog"):
        page.fill("#find", words)
        page.press("#find", "Enter")
        page.wait_for_selector("#rail .problem")
        said = page.locator("#rail .problem").inner_text()
        assert "zebrra" in said and page.input_value("#find") == words
        assert page.get_attribute("#find", "aria-invalid") == "true"
        assert page.locator(".chip").all_inner_texts() == chosen and "target=" not in page.evaluate("location.hash")
        if words == "zebrra":
            assert "zebra" in said.replace("zebrra", ""), "what is meant perhaps"
            shot(page, "refused")
    page.fill("#find", "Zebra")
    assert page.locator("#rail .problem").count() == 0
    page.press("#find", "Enter")
    page.wait_for_function("() => location.hash.includes('target=6')")
    maps(page, 3)
    page.fill("#find", "dog - zebra")
    page.press("#find", "Enter")
    page.wait_for_function("() => location.hash.includes('target=3-6')")


@pytest.mark.slow
def test_a_stale_link_is_said_once_and_the_page_works(visit: Callable[..., Any]) -> None:
    address = f"image={'0' * 32}&target=unicorn&target=3&method=nonsense&method=cdam&model=gone"
    page = visit(address)
    page.expected.extend(["status of 404", "status of 422"])
    maps(page, 1)
    said = page.locator(".problem:visible")
    assert said.count() == 1
    for part in ("no longer on the server", "unicorn", "nonsense", "no model gone"):
        assert part in said.inner_text()
    now = page.evaluate("location.hash")
    assert "image=sample:cat" in now and not any(part in now for part in ("unicorn", "nonsense", "gone"))
    assert "predicts" in page.locator(".lead").first.inner_text()
    shot(page, "stale")
    page.get_by_role("button", name="Dismiss").click()
    assert page.locator(".problem:visible").count() == 0
    page.goto(page.url.split("#")[0] + f"#image={'1' * 32}&tab=attention")
    page.wait_for_selector("#notice .problem")
    page.wait_for_selector(".heads .thumb canvas")
    assert page.locator(".problem:visible").count() == 1


@pytest.mark.slow
def test_a_question_that_is_no_longer_asked_keeps_nobody_waiting(visit: Callable[..., Any], site: str) -> None:
    slow = "method=dawdle&target=top-1"
    page = visit(slow, ready="#explain .progress:not([hidden])")
    page.click("#tab-inside")  # another tab's question
    page.wait_for_selector(".headbar")
    page.click("#tab-explain")  # and back: it is asked again
    page.wait_for_selector("#explain .progress:not([hidden])")
    page.click('#rail [title="rocket"]')  # another image
    page.wait_for_function("() => document.querySelector('.progress span').innerText.includes('dawdling')")
    left = time.monotonic()
    page.goto("about:blank")  # navigation
    other = visit("method=cdam&target=top-1")
    maps(other, 1)
    gone = time.monotonic() - left
    lost = visit(slow, ready="#explain .progress:not([hidden])")
    lost.context.close()  # a closed window
    maps(visit("method=gae&target=top-1"), 1)
    assert gone < PATIENCE / 2, "the slow job takes a thousand seconds"


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "high"), [(1280, 800), (1440, 900), (1920, 1080)])
def test_the_attention_tab_fills_a_wide_page(visit: Callable[..., Any], wide: int, high: int) -> None:
    page = visit("tab=attention", wide=wide, high=high, ready=".heads .thumb canvas")
    stage = page.locator("main").bounding_box()
    main, rolled = (page.locator(f"#attention {name}").bounding_box() for name in (".main .map", ".rollout"))
    shot(page, f"attention-{wide}")
    assert main["width"] > 0.35 * stage["width"] and main["height"] > 0.45 * stage["height"]
    assert rolled["x"] + rolled["width"] > stage["x"] + 0.95 * stage["width"], "nothing is empty at its right"
    assert rolled["y"] + rolled["height"] < high, "no scrolling"
    table = page.locator(".heads").bounding_box()
    assert main["x"] + main["width"] < table["x"] and table["x"] + table["width"] <= rolled["x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "count"),
    [
        ("method=cdam&target=3", 1),
        ("method=cdam&target=3&target=6", 2),
        ("method=rollout&target=3&target=6", 1),
        ("method=cdam&method=gae&target=3", 2),
        ("method=cdam&method=rollout&target=3&target=6", 3),
    ],
)
def test_few_maps_fill_a_wide_page(visit: Callable[..., Any], address: str, count: int) -> None:
    page = visit(address, wide=1440, high=900)
    maps(page, count)
    shot(page, f"few-{address.count('method=')}-{count}")
    stage = page.locator("main").bounding_box()
    shown = [one.bounding_box() for one in page.locator("#explain .grid .map").all()]
    assert max(box["x"] + box["width"] for box in shown) > stage["x"] + 0.6 * stage["width"], "the tab is half empty"
    assert page.get_by_role("rowheader").count() == address.count("target="), "still a table"
    assert min(box["y"] + box["height"] for box in shown) < stage["y"] + stage["height"], "a map is cut"
    assert page.evaluate(
        "() => { const { scrollWidth, clientWidth } = document.querySelector('main'); "
        "return scrollWidth <= clientWidth; }"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "high"), [(390, 844), (844, 390), (320, 568)])
def test_nothing_covers_the_maps_on_a_phone(visit: Callable[..., Any], wide: int, high: int) -> None:
    page = visit(
        f"{THREE}&method=dawdle", wide=wide, high=high, has_touch=True, ready="#explain .progress:not([hidden])"
    )
    covered = """maps => maps.filter(map => {
        map.scrollIntoView({ block: "center", inline: "center" });
        const { left, top, width, height } = map.getBoundingClientRect();
        const points = [0.1, 0.5, 0.9].flatMap(x => [0.1, 0.5, 0.9].map(y => [left + x * width, top + y * height]));
        const seen = points.filter(([x, y]) => x > 124 && x < innerWidth && y > 90 && y < innerHeight);
        return seen.some(([x, y]) => !map.contains(document.elementFromPoint(x, y)));
    }).length"""
    for tab in ("explain", "compare", "attention", "inside", "features"):
        page.evaluate("tab => document.getElementById(`tab-${tab}`).click()", tab)
        page.wait_for_selector(f"#{tab} .map:visible")
        shown = page.locator(f"#{tab} .map:visible")
        assert shown.count() >= 2
        assert shown.evaluate_all(covered) == 0, tab
        shot(page, f"phone-{tab}-{wide}")


@pytest.mark.slow
def test_areas_under_curves_are_labelled(visit: Callable[..., Any]) -> None:
    page = visit("method=cdam&method=rollout;discard=0.5&tab=faithfulness", ready=".chart .band")
    for metric, better in (("Deletion", "lower"), ("Insertion", "higher")):
        page.get_by_role("button", name=metric, exact=True).click()
        ready = "name => RegExp(`^${name}.*random`).test(document.querySelector('.areas').innerText)"
        page.wait_for_function(ready, arg=metric)
        said = page.locator(".areas").inner_text()
        assert said.startswith(f"{metric} AUC ({better} is better): cdam 0.") and ", random 0." in said
        assert ", rollout discard=0.5 0." in said
        assert "area under the curve" in said
        assert any("cdam AUC 0." in text for text in page.locator(".chart .name").all_text_contents())


@pytest.mark.slow
def test_what_would_change_it_is_found_and_undone(visit: Callable[..., Any]) -> None:
    page = visit("tab=faithfulness", ready="#counterfactual")
    page.locator("#counterfactual").scroll_into_view_if_needed()
    page.locator("#faithfulness .head select", has_text="any other class").select_option("any")
    page.get_by_role("button", name="Find", exact=True).click()
    told = page.locator("p.extras", has_text="the decision is")
    told.wait_for()
    count = int(told.inner_text().split(" of ")[0])
    assert count > 0 and page.locator("#faithfulness .chart svg[aria-label*='patches are removed']").count() == 1
    before = told.inner_text()
    page.get_by_role("button", name="Put one back").click()
    page.locator("p.extras", has_text=f"{count - 1} of 16").wait_for()
    page.get_by_role("button", name="The whole set").click()
    page.locator("p.extras", has_text=before).wait_for()
    page.locator("#counterfactual").focus()
    page.keyboard.press("Space")  # the first patch goes, or comes back
    changed = f"text=/^({count - 1}|{count + 1}) of 16 patches removed · the decision is/"
    page.wait_for_selector(changed)
    shot(page, "counterfactual")


@pytest.mark.slow
def test_curves_that_a_search_interrupted_go_on_after_it(visit: Callable[..., Any]) -> None:
    page = visit("tab=faithfulness", ready="#counterfactual")
    page.get_by_role("button", name="Find", exact=True).click()
    page.locator("p.extras", has_text="the decision is").wait_for()
    page.wait_for_selector("#faithfulness .areas:has-text('random')")
    assert page.locator("#faithfulness .problem:visible").count() == 0


@pytest.mark.slow
def test_dropped_and_pasted_photos(visit: Callable[..., Any]) -> None:
    page = visit(THREE)
    give = """async ([name, kind]) => {
        const blob = await (await fetch(`/api/images/sample:${name}/view`)).blob();
        const held = new DataTransfer();
        held.items.add(new File([blob], `${name}.webp`, { type: blob.type }));
        const event = kind === "drop"
            ? new DragEvent("drop", { dataTransfer: held, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: held, bubbles: true });
        document.querySelector("main").dispatchEvent(event);
    }"""
    shown = page.evaluate("location.hash")
    for name, kind in (("rocket", "drop"), ("coffee", "paste")):
        page.evaluate(give, [name, kind])
        page.wait_for_function("old => location.hash !== old", arg=shown)
        shown = page.evaluate("location.hash")
        assert "image=sample" not in shown
        maps(page, 5)
    page.go_back()
    page.wait_for_function("old => location.hash !== old", arg=shown)
    maps(page, 5)


@pytest.mark.slow
def test_colours_are_those_of_the_figures(visit: Callable[..., Any]) -> None:
    page = visit(THREE)
    draw = """async signed => {
        const { thumb } = await import("/draw.js");
        const canvas = document.createElement("canvas");
        thumb(canvas, Float32Array.from({ length: 256 }, (_, i) => i / 255), [1, 256], [0, 1], signed);
        return [...canvas.getContext("2d").getImageData(0, 0, 256, 1).data];
    }"""
    for signed in (False, True):
        ours = np.array(page.evaluate(draw, signed)).reshape(256, 4)[:, :3]
        theirs = colour_map(signed)(np.linspace(0, 1, 256))[:, :3] * 255
        assert np.abs(ours - theirs).max() < 4


@pytest.mark.slow
def test_features_follow_layer_basis_and_patch(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("tab=features", ready=FEATURES)
    told = page.locator("#features .extras")
    page.wait_for_function("() => document.querySelector('#features .extras').textContent.startsWith('Layer 2')")
    last = pixels(page, "#features canvas")
    page.locator("#features input[type=range]").fill("0")
    page.wait_for_function("() => document.querySelector('#features .extras').textContent.startsWith('Layer 0')")
    assert "in a basis of this image" in told.inner_text() and pixels(page, "#features canvas") != last
    page.get_by_role("button", name="All sample photos").click()
    page.wait_for_function("() => document.querySelectorAll('#features .photos canvas').length === 5")
    assert "the same for every image" in told.inner_text() and "basis=samples" in page.evaluate("location.hash")
    node = page.locator("#features .map").nth(1)
    box = node.bounding_box()
    node.click(position={"x": box["width"] * 0.9, "y": box["height"] * 0.1})
    page.wait_for_function("() => document.querySelectorAll('#features .map')[1].ariaLabel.includes('row 1, column 4')")
    assert "highest at the upper right: 1" in node.get_attribute("aria-label")
    shot(page, "features-samples")
    found = names_in(taken(page, "npz"), tmp_path)
    assert "similarity:layer=0,patch=3" in found and "component:layer=0,number=2,basis=samples" in found
    assert [row["component"] for row in rows_of(taken(page, "csv"))] == ["0", "1", "2"]
    check_view(taken(page, "png"), "features")
    page.get_by_role("button", name="show rocket").click()
    page.wait_for_function("() => location.hash.includes('rocket')")
    page.wait_for_selector("#features .photos [aria-pressed=true][aria-label='show rocket']")


@pytest.mark.slow
def test_features_of_merged_patches_are_drawn_on_their_grid(visit: Callable[..., Any]) -> None:
    page = visit("tab=features&model=timm-Swin&layer=3", ready=FEATURES)
    assert page.evaluate("document.querySelector('#features canvas').width") == 7


@pytest.mark.slow
def test_keyboard_alone(visit: Callable[..., Any]) -> None:
    page = visit(THREE)
    maps(page, 5)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"Tab never reaches {selector}")

    tab_to("#find")
    page.keyboard.type("zebra")
    page.wait_for_selector("[role=option]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.chip').length === 3")
    maps(page, 7)
    tab_to("#methods")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    tab_to("dialog .method summary")  # of each method two stops, or the arrow keys from one to the next
    page.keyboard.press("End")
    for _ in range(8):  # of the last methods
        if page.evaluate("document.activeElement.matches('[data-method=random] input')"):
            break
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Space")
    tab_to("dialog .strong")
    page.keyboard.press("Enter")
    maps(page, 8)
    tab_to(".grid .map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".badge:visible")
    assert "row" in page.locator("#live").inner_text()
    page.wait_for_function("() => location.hash.includes('patch=')")
    page.locator("#tab-explain").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#compare .grid .map")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".heads .thumb[aria-pressed=true]")
    tab_to(".heads .thumb")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.activeElement.getAttribute('aria-label') === 'layer 1, head 1'")
    page.locator("#tab-attention").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".traced .value")
    old = page.locator(".traced").inner_text()
    page.locator("#eraser").focus()
    for key in ("Space", "ArrowRight", "Space", "ArrowDown", "Space", "ArrowRight", "Space"):
        page.keyboard.press(key)
    page.wait_for_function("old => document.querySelector('.traced').innerText !== old", arg=old)
    page.keyboard.press("Control+z")
    page.wait_for_function("() => document.querySelector('.traced ~ .extras').innerText.startsWith('3 of')")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "wide", "high"),
    [("light", 1280, 800), ("dark", 390, 844), *rare(("dark", 1280, 800), ("light", 390, 844))],
)
def test_every_tab_fits(visit: Callable[..., Any], scheme: str, wide: int, high: int) -> None:
    ready = {"attention": ".heads canvas", "faithfulness": ".chart .curve", "inside": ".headbar", "concepts": ".form"}
    ready["features"], ready["compare"] = FEATURES, "#compare .grid .map"
    page = visit(THREE, wide=wide, high=high, color_scheme=scheme, reduced_motion="reduce", has_touch=wide < 500)
    for tab in TABS:
        page.evaluate("tab => document.getElementById(`tab-${tab}`).click()", tab)
        page.wait_for_selector(ready.get(tab, DONE))
        shot(page, f"{tab}-{wide}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= wide
    ink, paper = (luminance(page, "body", kind) for kind in ("color", "backgroundColor"))
    assert (ink > paper) == (scheme == "dark")
    for selector in ("body", ".quiet", "small", ".link", "[role=tab]"):
        light, dark = sorted([luminance(page, selector, "color"), paper], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector
    if wide > 500:
        page.click("#theme")
        assert (luminance(page, "body", "backgroundColor") > 0.5) == (scheme == "dark")
        page.reload()
        page.wait_for_selector("#tab-features[aria-selected=true]")
        assert (luminance(page, "body", "backgroundColor") > 0.5) == (scheme == "dark")
    else:
        assert not page.locator("#rail").is_visible()
        page.click("#sheet")
        shot(page, f"sheet-{wide}-{scheme}")
        page.locator("#rail .bar[aria-pressed=false]").first.tap()
        page.keyboard.press("Escape")
        assert not page.locator("#rail").is_visible()
        page.evaluate("document.getElementById('tab-explain').click()")
        maps(page, 7)
        page.locator(".grid .map").first.tap()
        page.wait_for_selector(".badge:visible")
        page.locator("#explain .grid").evaluate("t => { t.parentElement.scrollLeft = 300 }")
        assert page.locator("#explain .grid tbody th").first.bounding_box()["x"] <= 16


def luminance(page: Any, selector: str, kind: str) -> float:
    """Of a computed colour (WCAG)."""
    told = page.locator(selector).first.evaluate("(node, kind) => getComputedStyle(node)[kind]", kind)
    values = np.array([float(part) for part in told[told.index("(") + 1 : -1].split(",")[:3]]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.slow
def test_address_gives_the_view_again(visit: Callable[..., Any]) -> None:
    page = visit("method=rollout;discard=0.5&method=cdam&target=3&target=1-2&image=sample:coffee")
    maps(page, 3)
    page.locator("#strip input").first.fill("40")
    page.locator(".grid .map").first.click(position={"x": 60, "y": 60})
    page.wait_for_function("() => location.hash.includes('patch=') && location.hash.includes('opacity=40')")
    drawn, address = pixels(page, ".grid canvas"), page.evaluate("location.hash")
    again = visit(address[1:])
    maps(again, 3)
    again.wait_for_function("b => document.querySelector('.grid canvas').toDataURL() === b", arg=drawn)
    assert again.evaluate("location.hash") == address
    assert "discard 0.5" in again.locator(".grid thead th").first.inner_text()
    assert again.locator(".grid tbody th").nth(1).inner_text().count("rather than") == 1
    assert again.locator(".badge:visible").count() == 3

    again.click("#tab-inside")
    again.wait_for_selector(".headbar")
    again.click("#tab-attention")
    again.go_back()
    again.wait_for_selector("#tab-inside[aria-selected=true]")
    again.go_back()
    again.wait_for_selector("#tab-explain[aria-selected=true]")
    again.go_forward()
    again.wait_for_selector("#tab-inside[aria-selected=true]")


@pytest.mark.slow
def test_cancel_and_options(visit: Callable[..., Any]) -> None:
    page = visit("method=dawdle&method=cdam&target=top-1", ready=".progress:not([hidden])")
    page.wait_for_function(
        "n => RegExp(`\\\\d+/${n}.*left`).test(document.querySelector('.progress').innerText)", arg=LONG
    )
    shot(page, "progress")
    page.locator("#explain .progress button").click()
    page.wait_for_selector("#explain .problem")
    assert "Cancelled" in page.locator("#explain .problem").inner_text()
    page.click("#methods")
    page.wait_for_selector("dialog[open]")
    shot(page, "methods")
    page.locator("[data-method=dawdle] .options input").fill("2")
    page.get_by_role("button", name="Show these").click()
    maps(page, 2)
    assert "dawdle;times=2" in page.evaluate("location.hash")


@pytest.mark.slow
def test_errors_in_words_where_they_happen(visit: Callable[..., Any]) -> None:
    page = visit("method=cdam&method=attention_flow&model=timm-Swin", ready=".failed .problem")
    assert "attention" in page.locator(".failed .problem").inner_text()
    shot(page, "problem")
    page.set_input_files("#file", {"name": "note.png", "mimeType": "image/png", "buffer": b"no picture"})
    page.wait_for_selector("#rail .problem")
    assert "note.png" in page.locator("#rail .problem").inner_text()
    page.expected.append("status of 415")  # the browser tells of every refusal on its console, perhaps late
    page.select_option("#model", "timm-ViT")
    maps(page, 3)

    page.select_option("#model", "timm-Swin")
    page.click("#methods")
    assert page.locator(".method.off input:disabled").count() > 0
    assert "needs" in page.locator(".method.off .summary").first.inner_text()
    page.keyboard.press("Escape")
    page.click("#tab-attention")
    page.wait_for_selector("#attention .problem")
    assert page.locator("#attention .problem").inner_text() != ""
    page.expected.extend(["status of 404", "status of 422"])


@pytest.mark.slow
def test_a_place_is_clicked_and_a_box_is_drawn(visit: Callable[..., Any]) -> None:
    """On a model with an output for each place; the targets are in pixels of the image."""
    page = visit("model=segmenter&method=gradient&method=rollout&target=top-1")
    page.set_input_files("#file", photo(size=128))
    page.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    maps(page, 2)
    box = page.locator(".well .map").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 0.25)
    maps(page, 4)  # rollout depends on the place too
    assert page.locator(".chip").filter(has_text="at 96,32").count() == 1
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] * 0.5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.75, steps=4)
    assert page.locator(".well .sketch .marks").count() == 1
    page.mouse.up()
    maps(page, 6)
    assert page.locator(".chip").filter(has_text="in 32,64,6").count() == 1
    heads = page.locator(".grid tbody th").all_inner_texts()
    assert any("at 96,32" in head for head in heads) and any("in 32,64,6" in head for head in heads)
    shot(page, "region")
