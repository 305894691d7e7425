"""What the documents show works: every example is run, in a folder that holds the files it names.

Python, commands, requests      run, with small random models in place of those that would be downloaded
`# → …`                         is what the line before it prints
make, pip, podman               their targets, extras and files exist
TOML, JSON                      is read
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import timm
import torch
import typer
import zoo
from conftest import Run
from machine import PATIENCE
from PIL import Image
from safetensors.torch import save_file

from vitreous import METHODS, METRICS
from vitreous.cli import serve
from vitreous.cli.main import app
from vitreous.images.preprocess import IMAGENET
from vitreous.models.labels import read_labels
from vitreous.models.libraries import SOURCES, Loaded, cropped, embedded, huggingface, library_of

ROOT = Path(__file__).parents[1]
PHOTOS = ROOT / "src" / "vitreous" / "assets" / "photos"
OWN = ROOT / "docs" / "examples" / "own_method.py"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
sys.path.insert(0, str(ROOT / "docs"))

from _make import evidence, links, notebook

SIDE = 64  # pixels of the small models
PROSE = ("", "text", "nginx")  # fenced, but nothing that runs
CHEAP = """cass_attention.samples=2 integrated_gradients.steps=3 rise.masks=8 optimus.single_heads=false
    smoothgrad.samples=2 optimus.controls=3 sensitivity_n.subsets=3 token_deletion.steps=3 srg.steps=3 deletion.steps=4
    insertion.steps=4"""
RAY = ("--engine", "--workers", "--gpus", "--address")  # test_ray runs Ray; here the same study runs without
PEERS = ("captum", "quantus", "pytorch_grad_cam", "lightning", "wandb", "mlflow", "fiftyone")  # tests do without them
BEHIND = {"SummaryWriter(": "tensorboard", "TrainingArguments(": "accelerate", "pl.Trainer(": "lightning"}
FILES = re.compile(r"(?<![\w.])\w[\w./-]*\.(?:png|npz|html|csv|parquet|safetensors|json|gif|svg)\b")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of everything fenced."""
    return fenced(page.read_text(encoding="utf-8"))


def fenced(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# --------------------------------------------------------------------------------------------- models that are not here

Loader = Callable[..., Loaded]
create, load_timm = timm.create_model, SOURCES["timm"].load


def shrunk(name: str, pretrained: bool = False, **options: Any) -> Any:
    """A timm model of that name with few and narrow layers, the same every time."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3}
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        return create(name, pretrained=False, **{**small, **options})


def small_timm(name: str, weights: str | None, size: Any) -> Loaded:
    """Through the real loader, whose network is made small."""
    side = 56 if "patch14" in name else SIDE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", shrunk)
        return load_timm(name, weights, size or (side, side))


def small_embedded(side: int, depth: int = 12) -> Loader:
    """Heads and classes as in the package, but narrow and untrained."""

    def load(name: str, weights: str | None, size: Any) -> Loaded:
        net = shrunk("deit_tiny_patch16_224", depth=depth, img_size=side)
        labels = read_labels(embedded.ASSETS / "imagenet1k.txt")
        return Loaded(net, cropped((side, side), *IMAGENET), embedded.NAME, list(labels.values()))

    return load


def loaded(net: Any, name: str) -> Loaded:
    return Loaded(net, library_of(net).preprocess(net), name)


def small_hf(name: str, weights: str | None, size: Any) -> Loaded:
    if Path(name).is_dir():  # that an example has made
        return huggingface.load_base(name, weights, size)
    if any(word in name.lower() for word in ("llava", "smolvlm")):
        return speaking(name)
    if "segformer" in name:
        import test_dense_families as families

        net = families.awake(families.segformer())
        net.config.id2label = dict(enumerate(["cat", "dog", "sofa", "road", "floor"]))
        return loaded(net, Path(name).name)
    if any(word in name for word in ("detr", "yolos")):
        return detecting(name)
    kind = "HF DINOv2 sdpa" if "dinov2" in name else "HF ViT sdpa"
    return loaded(zoo.ZOO[kind].make(), Path(name).name)


def detecting(name: str) -> Loaded:
    import detectors

    if "detr" in name:
        return Loaded(detectors.detr(), cropped(detectors.LARGE, *IMAGENET), Path(name).name)
    return Loaded(detectors.yolos(num_detection_tokens=20), cropped(detectors.WIDE, *IMAGENET), Path(name).name)


def speaking(name: str) -> Loaded:
    """A vision-language model in a folder, with its processor."""
    import vlms

    net = vlms.built("llava")
    net.config._name_or_path = str(vlms.saved("llava"))
    return loaded(net, Path(name).name)


def small_torchvision(name: str, weights: str | None, size: Any) -> Loaded:
    import torchvision

    assert name in torchvision.models.list_models()
    net = zoo.torchvision()
    torch.nn.init.normal_(net.heads.head.weight)  # it begins with zeros, for which every map is empty
    return loaded(net, name)._replace(classifier=True)


def small_openclip(name: str, weights: str | None, size: Any) -> Loaded:
    import open_clip

    assert name in open_clip.list_models()
    tower = {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    net = open_clip.CLIP(embed_dim=16, vision_cfg=tower, text_cfg=text)
    return Loaded(net, cropped((SIDE, SIDE), *IMAGENET), name)


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is loaded by name is small; names must exist all the same."""
    for source in ("timm", "hf", "torchvision", "openclip"):
        monkeypatch.setattr(SOURCES[source], "load", globals()[f"small_{source}"])


# ----------------------------------------------------------------------------------------------------------- the folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Everything that examples name: photos, classes, masks, checkpoints, class names."""
    for number, name in enumerate(("cat", "coffee")):
        photo, called = Image.open(PHOTOS / f"{name}.jpg").resize((96, 72)), ("one", "two")[number]
        for place in ("photos", "examples", "pets/images", "imagenet-samples", "data/cat", "data/dog", "imagenet/val"):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            photo.save(tmp_path / place / f"{called}.jpg")
        mask = Image.new("L", photo.size)
        mask.paste(255, (20, 10, 70, 60))
        (tmp_path / "pets/masks").mkdir(exist_ok=True)
        mask.save(tmp_path / "pets/masks" / f"{called}.png")
    photo = Image.open(PHOTOS / "cat.jpg")
    photo.save(tmp_path / "photo.jpg")
    frames = [photo.rotate(angle).resize((64, 64)) for angle in range(0, 96, 6)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "pets/labels.csv").write_text("name,class\none,285\ntwo,967\n")
    (tmp_path / "imagenet-samples/labels.csv").write_text("image,label\none.jpg,285\ntwo.jpg,967\n")
    (tmp_path / "classes.txt").write_text("cat\ndog\nbird\n")
    for name, classes in {"mine": 3, "my": 1000, "deit": 1000, "deit_tiny_patch16_224": 1000}.items():
        net = shrunk("deit_tiny_patch16_224", num_classes=classes, img_size=SIDE)
        save_file(net.state_dict(), tmp_path / f"{name}.safetensors")
    (tmp_path / "own_method.py").write_text(OWN.read_text())
    (tmp_path / "src").symlink_to(ROOT / "src")
    return tmp_path


# ----------------------------------------------------------------------------------------------------------- running it

Visit = Callable[[int], None]


class Player:
    """Runs the examples of a page, one after the other."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.patch = run, monkeypatch
        self.space: dict[str, Any] = {"__name__": "__main__"}
        self.typed: Loader = small_embedded(96, 3)  # what commands have in place of the embedded model
        self.written: Loader = embedded.load  # what Python has
        self.absent: list[str] = []  # peers that an example uses and that are not installed

    @contextlib.contextmanager
    def embedding(self, load: Loader) -> Iterator[None]:
        with self.patch.context() as patch:
            patch.setattr(embedded, "load", load)
            yield

    def play(self, language: str, text: str) -> None:
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                self.line(line)
        elif language == "python":
            self.python(text)
        elif language == "toml":
            tomllib.loads(text)
            if "[[token]]" in text:
                Path("tokens.toml").write_text(text)
        elif language == "json":
            json.loads(text)
        else:
            assert language in PROSE, f"```{language}: say how it is checked"

    def line(self, line: str) -> None:
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        word = line.partition(" ")[0]
        if word:
            getattr(self, word)(line)

    def vitreous(self, line: str) -> None:
        words = shlex.split(os.path.expandvars(line))[1:]
        parse(words)
        if words[0] == "serve":
            self.serve(alone(words), answers)
            return
        with self.embedding(self.typed):
            done = self.run(*cheaper(without_gpu(without_ray(words))))
        assert done.code == 0, f"{line}: {done.err}"
        for file in FILES.findall(done.out):
            assert Path(file).exists(), f"{line}: says {file}"

    def serve(self, words: list[str], visit: Visit) -> None:
        """The server runs until the visit is over."""
        import uvicorn

        opened: list[str] = []
        listen, go = serve.listen, uvicorn.Server.run

        def until(server: Any, sockets: Any = None) -> None:
            thread = threading.Thread(target=go, args=(server, sockets))
            thread.start()
            try:
                while not server.started and thread.is_alive():
                    time.sleep(0.01)
                visit(sockets[0].getsockname()[1])
            finally:
                server.should_exit = True
                thread.join()

        with self.embedding(small_embedded(224)), self.patch.context() as patch:
            patch.setattr(serve, "listen", lambda host, port: listen(host, 0))
            patch.setattr(uvicorn.Server, "run", until)
            patch.setattr(serve.webbrowser, "open", opened.append)
            assert self.run(*words).code == 0
        assert bool(opened) == ("--open" in words)

    def curl(self, line: str) -> None:
        def visit(port: int) -> None:
            asked = shlex.split(line.replace("localhost:8000", f"127.0.0.1:{port}"))
            words = [*asked, "--fail-with-body"]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            json.loads(done.stdout)

        if shutil.which("curl") is None:
            pytest.skip("this page shows curl, which is not installed here")
        self.patch.delenv("VITREOUS_TOKEN", raising=False)
        self.serve(["serve"], visit)

    def python(self, text: str) -> None:
        """In one namespace for the whole page; what is the text of an example file lies in the folder already."""
        if text == OWN.read_text():
            return
        used = [name for name in PEERS if f"import {name}" in text or f"from {name}" in text]
        used += [package for call, package in BEHIND.items() if call in text]
        absent = [name for name in used if not find_spec(name)]
        if absent:
            self.absent += absent
            return
        if "127.0.0.1:8000" in text:
            self.serve(["serve"], lambda port: self.execute(text.replace("8000", str(port))))
        else:
            self.execute(text)

    def execute(self, text: str) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), self.embedding(self.written):
            exec(compile(text, "<example>", "exec"), self.space)
        expected = re.findall(r"^\s*print.*# → (.*)$", text, re.MULTILINE)
        told, printed = iter(expected), said.getvalue().splitlines()
        next_one = next(told, None)
        for line in printed:
            next_one = next(told, None) if next_one is not None and fits(line, next_one) else next_one
        assert next_one is None, f"printed {printed}, told {next_one}"

    def make(self, line: str) -> None:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(line.split()[1:]) <= set(targets)

    def pip(self, line: str) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        named = re.fullmatch(r"pip install '?vitreous(?:\[([\w,]+)\])?'?", line)
        assert named, line
        assert set((named[1] or "all").split(",")) <= set(project["optional-dependencies"])

    def export(self, line: str) -> None:
        name = line.split()[1].partition("=")[0]
        script = f'{line}; printf %s "${name}"'
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={"PATH": path})
        assert told.stdout
        self.patch.setenv(name, told.stdout)

    def podman(self, line: str) -> None:
        assert (ROOT / "Containerfile").exists()
        if " run " in line:
            parse(["serve", *shlex.split(line.rpartition(" vitreous ")[2])])


def fits(printed: str, told: str) -> bool:
    """Is this what was told? "…" stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, told.split("…"))), printed) is not None


def parse(words: list[str]) -> None:
    """As it is written, with the real parser."""
    command, rest = typer.main.get_command(app), list(words)
    while hasattr(command, "commands") and rest:
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest, resilient_parsing=False)


def without_ray(words: list[str]) -> list[str]:
    if "ray" not in words:
        return words
    return [word for before, word in zip(["", *words], words) if word not in RAY and before not in RAY]


def without_gpu(words: list[str]) -> list[str]:
    """The same on the CPU, if there is no GPU here."""
    if torch.cuda.is_available() or "cuda" not in words:
        return words
    own = ("--device", "--decode")
    return [word for before, word in zip(["", *words], words) if word not in own and before not in own]


def alone(words: list[str]) -> list[str]:
    """The same server in one process; test_web_team_processes.py starts teams."""
    return [word for before, word in zip(["", *words], words) if "--workers" not in (before, word)]


def cheaper(words: list[str]) -> list[str]:
    """The same with one picture and few samples, where all methods are asked for; few steps of a long ascent."""
    if words[0] == "maximize":
        return [*words, "--steps", "2"]
    if words[0] == "advise" and not {"-x", "--method"} & {*words}:
        return [*words, "--method", "gae,gradcam,rollout"]
    if "all" not in words or words[0] != "evaluate":
        return words
    asked = words[words.index("--metric") + 1].split(",")
    names = {*METHODS, *(name for name, one in METRICS.items() if name in asked or one.family in asked)}
    given = [*words, "--limit", "1"]
    return [*given, *(w for option in CHEAP.split() if option.partition(".")[0] in names for w in ("--set", option))]


def answers(port: int) -> None:
    """The page comes to those who have the token, and to no one else."""
    import httpx

    token = os.environ.get("VITREOUS_TOKEN")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as page:
        if token:
            assert page.get("/api/info").status_code == 401
            page.headers["Authorization"] = f"Bearer {token}"
        assert page.get("/").status_code == 200
        assert page.get("/api/info").json()["models"]


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the checks of shapes and types, which all other tests make: they cost as much as all the rest."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def player(
    folder: Path, small_models: None, unchecked: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Player]:
    monkeypatch.setattr("vitreous.plot.figure.DPI", 50)  # small figures
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("VITREOUS_TOKEN", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with METHODS.temporary():
        yield Player(run, monkeypatch)
    sys.modules.pop("own_method", None)


LONG = (
    *(
        "ablate.md",
        "bridges.md",
        "coming-from.md",
        "concepts.md",
        "counterfactual.md",
        "dense.md",
        "features.md",
        "diff.md",
        "discover.md",
        "inputs.md",
        "detection.md",
        "inspect.md",
        "maximize.md",
        "own-model.md",
        "registers.md",
        "shortcuts.md",
        "reparametrisation.md",
        "results.md",
        "video.md",
    ),
    *("serve.md", "studies.md", "which-method.md"),
)
FOREIGN = ("coming-from.md",)  # other packages, which warn of much
SHOWN = [
    pytest.param(
        page,
        id=page.name,
        marks=[
            *([pytest.mark.slow] if page.name in LONG else []),
            *([pytest.mark.filterwarnings("ignore")] if page.name in FOREIGN else []),
        ],
    )
    for page in PAGES
    if blocks(page)
]


@pytest.mark.parametrize("page", SHOWN)
def test_examples_run(page: Path, player: Player) -> None:
    if page.name in ("discover.md", "features.md", "inspect.md", "maximize.md"):  # they name its layers
        player.typed = small_embedded(96)
    for language, text in blocks(page):
        player.play(language, text)
    if player.absent:
        pytest.skip(
            f"examples with {', '.join(dict.fromkeys(player.absent))}, which are not installed here, were left out"
        )


def test_commands_parse() -> None:
    lines = [
        line for page in PAGES for language, text in blocks(page) if language == "sh" for line in text.splitlines()
    ]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("vitreous ")]
    assert len(commands) > 60
    for words in commands:
        parse(words)


def test_examples_with_peers_are_left_out_only_without_them(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_docs.PEERS", ("nowhere_to_be_found", "json"))
    player.play("python", "from nowhere_to_be_found import x")
    assert player.absent == ["nowhere_to_be_found"]
    with pytest.raises(ZeroDivisionError):
        player.play("python", "import json\n1 / 0")


def test_a_wrong_example_is_noticed(player: Player) -> None:
    for text in ("print(1)  # → 2", "raise ValueError"):
        with pytest.raises((AssertionError, ValueError)):
            player.play("python", text)
    for line, kind, said in (
        ("vitreous explain nowhere.jpg", AssertionError, "nowhere.jpg: no such file"),
        ("vitreous explain photo.jpg --methodd gae", Exception, "No such option.*--methodd"),  # the parser's
        ("make nothing", AssertionError, "nothing"),
        ("pip install vitreous[sushi]", AssertionError, "sushi"),
        ("sudo x", AttributeError, "sudo"),
    ):
        with pytest.raises(kind, match=said):
            player.play("sh", line)
    with pytest.raises(AssertionError, match="say how it is checked"):
        player.play("brainfuck", "+")


# ------------------------------------------------------------------------------------------------------ generated pages


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["methods", "metrics"])
def test_examples_of_generated_pages_run(kind: str, player: Player) -> None:
    from _make import declared

    player.typed = player.written = small_embedded(SIDE, 2)
    for one in (METHODS if kind == "methods" else METRICS).values():
        if getattr(one, "others", False):  # needs images of four classes, which this model does not have
            continue
        examples = fenced("\n\n".join(declared.uses(one)))
        assert [language for language, _ in examples] == ["sh", "python"]
        for language, text in examples:
            player.play(language, text)


def test_results_are_read_from_their_document() -> None:
    """The tables list what was run: known methods, the controls among them; not every method has to be there."""
    for board in evidence.boards().values():
        assert {"random", "centre", "gae"} <= {*board} and {row.split()[0] for row in board} <= {*METHODS}
        columns = {column.split()[0] for column in next(iter(board.values()))} - {"rank", "forwards"}
        assert columns and columns <= {*METRICS}
    assert evidence.forwards("gae") == "2.7" and evidence.forwards("optimus") == "1412.9"
    costs = (evidence.RESULTS / "cpu-deit_tiny_patch16_224-batch8.md").read_text(encoding="utf-8")
    assert f"| gae | {evidence.cpu_costs()['gae']} (" in costs
    told = [" ".join(" ".join(row).split()) for row in evidence.measured("gae")]
    assert "192 pets srg 0.303 ±.023 -0.004 ±.012" in told


def test_links_of_included_documents_are_rewritten() -> None:
    text = "[a](../docs/studies.md#x) ![b](figures/c.png) [d](https://e) [f](cost.py) [g](README.md)"
    here = ROOT / "benchmarks" / "README.md"
    made = "[a](studies.md#x) ![b](figures/c.png) [d](https://e) f [g](benchmarks.md)"
    assert links.relink(text, here, "benchmarks.md") == made


def test_links_lead_somewhere() -> None:
    made = {*links.INCLUDED, "tutorial.md", "gallery.md", "cli.md", "api.md"}
    made |= {f"{kind}s/{name}.md" for kind, known in (("method", METHODS), ("metric", METRICS)) for name in known}
    made |= {"methods/index.md", "metrics/index.md", "home.webp"}
    followed = 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                there = (page.parent / link).exists() or (page.parent.name == "docs" and link in made)
                assert there, f"{page.name}: {link}"
                followed += 1
    assert followed > 50


# --------------------------------------------------------------------------------------------------------- the tutorial

TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


def test_the_tutorial_is_a_valid_notebook_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    read = nbformat.read(TUTORIAL, as_version=4)
    nbformat.validate(read)
    assert not any(cell.get("outputs") for cell in read.cells)


@pytest.mark.slow
def test_the_tutorial_runs(unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, with the real model; what it concludes holds."""
    monkeypatch.chdir(tmp_path)
    ran = [cell for cell in notebook.run(TUTORIAL) if cell.kind == "code"]
    assert sum(cell.picture is not None for cell in ran) >= 8
    scores = next(cell.text for cell in ran if "token_deletion" in cell.source and "random" in cell.source)
    found = {line.split()[0]: float(line.split()[1]) for line in scores.splitlines()}
    assert max(found["gae"], found["attn_lrp"]) < found["random"] <= found["rollout"] + 0.1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- the site


@pytest.mark.slow
@pytest.mark.process
def test_the_site_is_built_without_warnings_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assets = re.findall(
            r'<(?:link|script|img|iframe|source|video)\b[^>]*?(?:href|src)="((?:https?:)?//[^"]+)', text
        )
        assert not assets, f"{page.name} fetches {assets}"
        assert 'class="mermaid"' not in text
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8"))
