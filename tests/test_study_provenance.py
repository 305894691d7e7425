"""Every row of a study leads to what made it, and studies of earlier formats open."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from pyarrow import parquet
from test_study import album, small

import vitreous
from vitreous import Model, open_study, run_study
from vitreous.errors import InputError, OptionError
from vitreous.evaluation.study.plan import FORMAT
from vitreous.evaluation.study.read import Study
from vitreous.images.dataset import Data, read_data

__all__ = ["album", "small"]  # fixtures
NEW = ["image_hash", "target_label", "probability"]  # columns since format 2


@pytest.fixture(scope="module")
def study(small: Model, album: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    given = {"methods": "attention,gae", "target": ["label", "top-2"], "shard": 4, "batch": 4}
    return run_study("maps", album, small, tmp_path_factory.mktemp("study"), **given)  # type: ignore[arg-type]


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_rows_name_the_content_of_their_image(study: Study, album: Path) -> None:
    rows = study.to_pandas()
    assert all(row["image_hash"] == sha(album / row["image"]) for row in rows.to_dict("records"))
    assert rows["image_hash"].nunique() == 10  # the broken one too


def test_rows_name_their_target_and_its_probability(study: Study, small: Model, album: Path) -> None:
    rows = study.to_pandas()
    for row in rows[(rows["method"] == "gae") & rows["error"].isna()].to_dict("records"):
        shares = vitreous.Trace(small, album / row["image"]).output.softmax(-1)[0]
        assert row["probability"] == pytest.approx(shares[int(row["target"])].item(), rel=1e-4)
        assert row["target_label"] == small.label(int(row["target"]))
    assert rows[rows["error"].notna()]["probability"].isna().all()


def test_the_provenance_of_a_row_is_that_of_an_explanation(study: Study, small: Model, album: Path) -> None:
    found = study.provenance("hound/7.png", "gae", target="1")
    expected = vitreous.explain(small, album / "hound/7.png", "gae", 1).provenance
    assert set(found) == set(expected)
    own = {"notes", "probabilities", "images", "sources"}
    assert {key: found[key] for key in found if key not in own} == {
        key: expected[key] for key in found if key not in own
    }
    assert found["probabilities"] == pytest.approx(expected["probabilities"], rel=1e-4)
    assert found["sources"] == [{**expected["sources"][0], "name": "hound/7.png"}]
    assert found["notes"] == {"study": study.folder.name, "asked": "label", "error": None}
    json.dumps(found)
    bare = study.provenance("hound/7.png", "attention", target="1")
    assert bare["targets"] == [None] and bare["labels"] == []


def test_a_row_is_enough(study: Study) -> None:
    rows = study.to_pandas()
    row = rows[(rows["method"] == "gae") & (rows["asked"] == "top-2")].iloc[0]
    assert study.provenance(row.to_dict()) == study.provenance(row["image"], "gae", target=row["target"])
    assert study.provenance(row)["sources"][0]["sha256"] == row["image_hash"]
    stored = next(study.iter_maps("gae"))
    assert study.attribution(stored).target == stored["target"]
    bad = rows[rows["error"].notna()].iloc[0]
    assert study.provenance(bad)["notes"]["error"] == bad["error"]


def test_a_map_comes_back_as_an_attribution(study: Study, small: Model, album: Path, tmp_path: Path) -> None:
    found = study.attribution("hound/7.png", "gae", target="1")
    expected = vitreous.explain(small, album / "hound/7.png", "gae", 1)
    torch.testing.assert_close(found.map, expected.map, rtol=1e-4, atol=1e-6)
    assert found.box == expected.box and found.signed == expected.signed and found.labels == expected.labels
    again = vitreous.Attribution.load(found.save(tmp_path / "a.npz"))
    assert again.provenance == json.loads(json.dumps(found.provenance))


def test_what_is_not_there_or_not_clear_is_said(study: Study, small: Model, album: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no row of image none\.png"):
        study.provenance("none.png")
    with pytest.raises(InputError, match=r"no row of image hound/7\.png, method gea; did you mean gae"):
        study.provenance("hound/7.png", "gea")
    with pytest.raises(OptionError, match=r"has several rows .*choose a method, a target"):
        study.provenance("hound/7.png")
    assert study.provenance("hound/7.png", "gae", target="label")["target"] == "1"
    with pytest.raises(OptionError, match="names no image"):
        study.provenance({"method": "gae"})
    with pytest.raises(InputError, match=r"cat/3\.png: there is no map of gae \(.*not an image"):
        study.attribution(study.to_pandas().query("image == 'cat/3.png' and method == 'gae'").iloc[0])
    board = run_study("leaderboard", album, small, tmp_path, methods="gae", metrics="sparsity", limit=1)
    assert board.provenance("cat/0.png", "gae")["weights"]["digest"]
    with pytest.raises(InputError, match="a study leaderboard stores none"):
        board.attribution("cat/0.png", "gae")


@pytest.mark.parametrize("kind", ["cass", "spread"])
def test_kinds_with_their_own_method(kind: str, small: Model, album: Path, tmp_path: Path) -> None:
    options = {"cass": {"samples": 1}} if kind == "cass" else {}
    found = run_study(kind, album, small, tmp_path, options=options, limit=1).attribution("cat/0.png")
    assert found.method == {"cass": "cass_attention", "spread": "attention"}[kind] and found.map.shape == (1, 4, 4)
    assert found.provenance["weights"]["digest"] and len(found.targets) == 1


def test_the_manifest_says_where_models_and_images_lie(small: Model, album: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.pth"
    torch.save(vitreous.load().module.state_dict(), file)
    study = run_study("maps", album, vitreous.load(weights=file), tmp_path / "out", methods="attention", limit=1)
    told = study.manifest["origins"]["vitreous_tiny"]
    assert told["weights"]["files"] == [{"path": str(file), "sha256": sha(file)}]
    assert told["preprocess"]["size"] == [224, 224] and told["versions"]["torch"] == torch.__version__
    assert study.manifest["root"] == str(album)
    moved = shutil.move(file, tmp_path / "other.pth")  # where they lie does not make it another study
    again = run_study("maps", album, vitreous.load(weights=moved), tmp_path / "out", methods="attention", limit=1)
    assert again.folder == study.folder


def test_where_names_are_paths(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (album.parent / "table.csv").write_text(f"image\n{album.name}/cat/0.png\n")
    monkeypatch.chdir(album)
    for data in (read_data(album), read_data("."), read_data("cat/*.png"), read_data(album.parent / "table.csv")):
        assert data.root is not None
        assert all((Path(data.root) / sample.name).samefile(sample.image) for sample in data.samples)  # type: ignore[arg-type]
    assert Data("nothing", ()).root == str(album)


# ---------------------------------------------------------------------------------------------------- earlier formats


def test_a_study_of_the_first_format_opens(study: Study, tmp_path: Path) -> None:
    """As it was written before rows had what made them."""
    old = tmp_path / "old" / study.folder.name
    shutil.copytree(study.folder, old)
    manifest = {key: value for key, value in study.manifest.items() if key not in ("origins", "root")}
    (old / "study.json").write_text(json.dumps({**manifest, "format": 1}))
    for file in (old / "shards").glob("*.parquet"):
        parquet.write_table(parquet.read_table(file).drop_columns(NEW), file)
    found = open_study(old)
    assert found.finished and found.findings()["small"].lead == study.findings()["small"].lead
    rows, now = found.to_pandas(), study.to_pandas()
    assert list(rows.columns) == list(now.columns) and rows[NEW].isna().all().all()
    pd.testing.assert_frame_equal(rows.drop(columns=NEW), now.drop(columns=NEW))
    told = found.provenance("hound/7.png", "gae", target="1")
    assert told["weights"] == {"files": [], "digest": study.about["weights"]} and told["sources"][0]["sha256"] is None
    maps = [one.attribution("hound/7.png", "gae", target="1").map for one in (found, study)]
    assert torch.equal(*maps)


def test_a_study_of_the_first_release_tells_what_it_knows() -> None:
    first = open_study(Path(__file__).parent / "first_release" / "study")
    row = first.to_pandas().iloc[0]
    told = first.provenance(row)
    assert told["vitreous"] == "0.1.0" and told["weights"]["digest"] == "281925057ee66636" and told["versions"]["timm"]
    assert first.attribution(row).map.shape == (1, 14, 14)


def test_a_study_of_a_later_format_is_refused(study: Study, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({**study.manifest, "format": FORMAT + 1}))
    with pytest.raises(InputError, match="was written by a newer version of vitreous"):
        open_study(tmp_path)
