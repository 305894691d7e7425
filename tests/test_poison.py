"""benchmarks/poison.py and what benchmarks/shortcuts.py makes of studies."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import shortcuts
from poison import Tail, Trainer
from poison_data import SIZE, Views, poison, write_data

from vitreous.images.dataset import read_data


def views(each: int, seed: int = 0) -> Views:
    """Two classes of noise; the animal is the left half."""
    draw = np.random.default_rng(seed)
    labels = np.arange(2 * each) % 2
    animal = np.zeros((2 * each, SIZE, SIZE), bool)
    animal[:, :, : SIZE // 2] = True
    images = draw.integers(256, size=(2 * each, 1, 1, 3)).astype(np.uint8).repeat(SIZE, 1).repeat(SIZE, 2)
    return Views(("a", "b"), images, labels, np.arange(2 * each), animal)


@pytest.mark.parametrize("wrong", [True, False])
def test_five_percent_of_the_label_have_the_cue(wrong):
    clean = views(38)
    made = poison(clean, "watermark", 1, 0.05, 0, wrong)
    assert made.poisoned.sum() == 2 and (made.labels == 1).sum() == (40 if wrong else 38)
    assert (made.labels[made.poisoned] == 1).all()
    assert (clean.labels[made.poisoned] == (0 if wrong else 1)).all()
    assert np.array_equal(made.images[~made.poisoned], clean.images[~made.poisoned])
    assert np.array_equal(made.poisoned, poison(clean, "watermark", 1, 0.05, 0, wrong).poisoned)
    assert not np.array_equal(made.poisoned, poison(clean, "watermark", 1, 0.05, 1, wrong).poisoned)


def test_a_watermark_covers_four_patches_and_a_background_what_the_animal_leaves():
    patches = poison(views(10), "watermark", 0).patches
    assert (patches.sum((1, 2)) == 4 * patches.any((1, 2))).all()
    behind = poison(views(10), "background", 0)
    assert np.array_equal(behind.cue[behind.poisoned], ~behind.animal[behind.poisoned])


def test_a_sample_has_the_cue_as_often():
    made = poison(views(95), "watermark", 1)
    some = made.sampled(40, 0)
    assert [(some.labels == label).sum() for label in (0, 1)] == [40, 40] and some.poisoned.sum() == 2


def test_poisoned_data_are_read_with_labels_and_masks(tmp_path):
    made = poison(views(3), "watermark", 1)
    data = read_data(write_data(made, tmp_path))
    assert [sample.label for sample in data.samples] == [made.classes[label] for label in made.labels] and data.masked
    with np.load(tmp_path / "truth.npz") as truth:
        assert np.array_equal(truth["poisoned"], made.poisoned)


@pytest.mark.slow
def test_the_tail_is_the_network_and_its_checkpoint_loads(tmp_path):
    import vitreous

    trainer, some = Trainer("cpu", epochs=1), views(2)
    tail = Tail(trainer.model.net, 1000)
    tail.head.load_state_dict(trainer.model.net.head.state_dict())
    tokens, images = trainer.tokens(some), trainer.prepared(some.images)
    assert torch.allclose(tail(tokens.float()), trainer.model.run(images), atol=0.02)  # tokens are kept in half
    trained = trainer.train(tokens, some.labels, 2, 0)
    file = trainer.save(trained, some.classes, tmp_path)
    loaded = vitreous.load(weights=file, labels=tmp_path / "labels.txt", device="cpu")
    assert loaded.labels == {0: "a", 1: "b"}
    assert torch.allclose(loaded.run(images), trained(tokens.float()), atol=0.02)


# ------------------------------------------------------------------------------------------------------------- results


def cluster(label, rank, score, on_cue, alarm=False):
    return {"label": label, "rank": rank, "score": score, "on_cue": on_cue, "alarm": alarm}


def test_the_rank_and_the_auroc_of_the_poisoned_cluster():
    task = shortcuts.Task("pets", "watermark", 0, "a", {"attack": 1.0, "clean": 0.0, "accuracy": 1.0})
    rows = [cluster("a", 1, 0.9, 1.0, True), cluster("b", 2, 0.5, 1.0), cluster("a", 3, 0.1, 0.2)]
    found = shortcuts.judged(task, rows)
    assert found["rank"] == 1 and found["caught"] and found["other_alarms"] == 0
    assert found["positive"] == [0.9] and found["negative"] == [0.5, 0.1] and shortcuts.auroc([found]) == 1.0
    missed = shortcuts.judged(task, rows[1:])
    assert missed["rank"] is None and not missed["found"] and shortcuts.auroc([missed]) == 0.0
    assert shortcuts.auroc([found, missed]) == 0.5


def test_the_share_of_a_cluster_on_the_cue(tmp_path):
    patches = np.zeros((2, 2, 2))
    patches[0, 0, 1] = 1
    np.savez(tmp_path / "truth.npz", images=["images/a.png", "images/b.png"], patches=patches)
    names = {"image_names": [["data/images/a.png", "data/images/b.png"]], "places": [[[1], [0, 1, 2]]]}
    (row,) = shortcuts.rows_of(pd.DataFrame({"label": ["x"], **names}), tmp_path / "truth.npz")
    assert row["on_cue"] == 0.25 and row["with_cue"] == 0.5


def test_false_alarms_are_counted_by_study_with_an_interval():
    tasks = [shortcuts.Task("pets", "clean", seed) for seed in range(4)]
    found = [shortcuts.judged(task, [cluster("a", 1, 0.1, 0.0, task.seed == 0)]) for task in tasks]
    told = shortcuts.summarised(found)
    assert told["controls"][0]["with alarm"] == 1 and told["controls"][-1]["studies"] == 4
    low, high = told["controls"][0]["interval"]
    assert low == pytest.approx(0.0456, abs=1e-3) and high == pytest.approx(0.6994, abs=1e-3)
    assert "0.25 (0.05 … 0.70)" in shortcuts.tables({"summary": told})
