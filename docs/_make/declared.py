"""A page for each method and each metric, made of its declaration, its measurements and its known limits."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from _make import evidence, figures
from vitreous import METHODS, METRICS
from vitreous._support import formula
from vitreous.declaration import takes, typed
from vitreous.references import REFERENCES, cited
from vitreous.registry import Declared, Method, Metric

FAMILIES = {
    "arbitration": "Arbitration",
    "attention": "Attention",
    "attention_gradient": "Attention × gradient",
    "cam": "Class activation",
    "control": "Controls",
    "gradient": "Gradient",
    "lrp": "Relevance propagation",
    "perturbation": "Perturbation",
    "text": "Text",
    "complexity": "Complexity",
    "discrimination": "Class discrimination",
    "faithfulness": "Faithfulness",
    "localisation": "Localisation",
    "robustness": "Robustness",
    "sanity": "Sanity",
    "shortcut": "Shortcuts",
}
PURPOSES = {"complexity": "describes a map", "shortcut": "describes the model"}
UNWRITTEN = "None have been documented yet."
NOTATION = """B images, L layers, H attention heads, N tokens, of which h·w are patches. A⁽ˡ⁾ₕ is the attention of head
h in layer l (row i: what token i reads), x the image, y the score of the target, ρ how much the classifier reads of
each token (for most models 1 on CLS), ∇A = ∂y/∂A, ⊙ the element-wise product, ( )⁺ the positive part."""
PICTURES = "the embedded model on a packaged image"


def method_page(one: Method) -> str:
    return "\n\n".join(
        [
            *opening(one),
            picture(figures.method_figure(one.name), f"The map of {one.name} on a cat", f"../methods/{one.name}.webp"),
            facts(one, method_facts(one)),
            "## Use it",
            *uses(one),
            *options(one),
            *results_of(one),
            "## Known limits",
            known_limits(one),
            f"Source: `src/vitreous/methods/{one.family}/{one.name}.py`",
        ]
    )


def metric_page(one: Metric) -> str:
    return "\n\n".join(
        [
            *opening(one),
            facts(one, metric_facts(one)),
            "## On an image",
            *shown(one),
            "## Use it",
            *uses(one),
            *options(one),
            *standing(one),
            "## Known limits",
            known_limits(one),
            f"Source: `src/vitreous/metrics/{one.family}/{one.name}.py`",
        ]
    )


def family_name(family: str) -> str:
    """As a heading; a folder that is not listed above is called by its own name."""
    return FAMILIES.get(family, family.replace("_", " ").capitalize())


def known_limits(one: Declared) -> str:
    """As docs/limits.md tells them; the tests ask for what is not there."""
    return evidence.limits().get(one.name, UNWRITTEN).replace("](", "](../")


def opening(one: Declared) -> list[str]:
    head = f"---\ntitle: {one.name}\ndescription: {one.summary!r}\n---"
    return [head, f"# {one.name}", one.summary, f'<div class="formula">{formula.text(one.formula)}</div>']


def picture(file: Path, words: str, link: str) -> str:
    assert file.exists()
    return f"[![{words}]({link})]({link})"


def facts(one: Declared, rows: dict[str, str]) -> str:
    """A small table without a head."""
    rows = {"family": family_name(one.family), **rows}
    if one.cite:
        rows["reference"] = reference(one.cite)
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {said} |" for name, said in rows.items())])
    return f'<div class="facts" markdown>\n\n{table}\n\n</div>'


def reference(key: str) -> str:
    if key not in REFERENCES:
        return cited(key)
    work = REFERENCES[key]
    return f"{work.authors} ({work.year}). [{work.title}]({work.url}). {work.place}"


def method_facts(one: Method) -> dict[str, str]:
    signed = one.is_signed(one.check({}))
    sign = "signed: evidence and counter-evidence" if signed else "unsigned"
    if one.level:
        sign = "a level: only differences are meaningful"
    if callable(one.signed):
        sign += ", by default"
    return {
        "map": sign,
        "depends on the target": "yes" if one.targeted else "no",
        "needs": needs(one),
        "cost": cost(one.name),
    }


def needs(one: Method) -> str:
    """Of the model."""
    if one.attention:
        return "attention from token to token ([models](../models.md))"
    if one.tokens:
        return "tokens that enter an attention layer of any kind"
    return "nothing" if one.family == "control" else "any network"


def cost(name: str) -> str:
    """In plain forward passes of the same image."""
    gpu, cpu = evidence.forwards(name), evidence.cpu_costs().get(name)
    on_gpu = f"{gpu} forward passes on a GPU ([results](../results.md))" if gpu else ""
    on_cpu = f"{cpu} {'' if gpu else 'forward passes '}on a CPU ([benchmarks](../benchmarks.md))" if cpu else ""
    return ", ".join(part for part in (on_gpu, on_cpu) if part) or "not measured"


def metric_facts(one: Metric) -> dict[str, str]:
    direction = one.direction(one.check({}))
    return {
        "better": f"{direction}{', by default' if callable(one.better) else ''}",
        "needs": "masks or boxes of the object" if one.masks else "the map and the model",
        "runs the method again": "yes" if one.again else "no",
        "purpose": PURPOSES.get(one.family, "judges a map"),
    }


# ------------------------------------------------------------------------------------------------------------- examples


def uses(one: Declared) -> list[str]:
    """On the command line and in Python; the tests run both."""
    shell, python = (method_example if isinstance(one, Method) else metric_example)(one)
    return [f"```sh\n{shell}\n```", f"```python\n{python}\n```"]


def method_example(one: Declared) -> tuple[str, str]:
    options = one.schema["options"]
    name, value = next(iter((name, one["default"]) for name, one in options.items()), ("", None))
    told = f" --set {one.name}.{name}={typed(value)}" if name and value is not None else ""
    given = f", {name}={value!r}" if name else ""
    python = (
        "import vitreous\n\n"
        f'found = vitreous.explain(vitreous.load(), "photo.jpg", "{one.name}"{given})\n'
        "print(found.map.shape, found.signed)"
    )
    return f"vitreous explain photo.jpg --method {one.name}{told}", python


def metric_example(one: Declared) -> tuple[str, str]:
    masked = isinstance(one, Metric) and one.masks
    data = "pets/ --masks pets/masks" if masked else "photos/"
    where = ", masks=[(40, 30, 260, 240)]" if masked else ""
    method = "integrated_gradients" if one.name == "completeness" else "gae"
    images = '["a.jpg", "b.jpg", "c.jpg", "d.jpg"]' if isinstance(one, Metric) and one.others else '"photo.jpg"'
    python = (
        "import vitreous\n\n"
        "model = vitreous.load()\n"
        f'score = vitreous.evaluate(model, {images}, "{method}", "{one.name}"{where})\n'
        "print(score.mean, score.better)"
    )
    return f"vitreous evaluate {data} --method {method} --metric {one.name}", python


def options(one: Declared) -> list[str]:
    rows = [
        f"| `{name}` | `{typed(schema.get('default'))}` | {takes(schema)} | {schema.get('description', '')} |"
        for name, schema in one.schema["options"].items()
    ]
    if not rows:
        return ["## Options", "None."]
    return ["## Options", "\n".join(["| option | default | takes | what it does |", "|---|---|---|---|", *rows])]


# ------------------------------------------------------------------------------------------------------------- evidence


def results_of(one: Method) -> list[str]:
    """Its row of the leaderboard, beside `random`."""
    if one.name == "random":
        return []
    rows = evidence.measured(one.name)
    title = "## How well it does"
    if not rows:
        return [title, "Not part of [the leaderboard](../results.md)."]
    said = "DeiT-Tiny, means ± half the 95 % interval; “=”: no clear difference from `random`, “▼”: worse than it."
    groups = dict.fromkeys(pictures for pictures, *_ in rows)
    heads = " | ".join(f"{group} | random" for group in groups)
    table = [f"| metric | {heads} |", "|---" * (1 + 2 * len(groups)) + "|"]
    for metric in dict.fromkeys(metric for _, metric, *_ in rows):
        told = {pictures: f"{mine} | {chance}" for pictures, m, mine, chance in rows if m == metric}
        cells = " | ".join(told.get(group, " | ") for group in groups)
        table.append(f"| [{metric}](../metrics/{bare(metric)}.md) {arrow(bare(metric))} | {cells} |")
    return [title, f"{said} All methods: [results](../results.md).", "\n".join(table)]


def bare(label: str) -> str:
    """The name of a method or metric without its options: srg of "srg of=logit"."""
    return label.split()[0]


def arrow(metric: str) -> str:
    one = METRICS[metric]
    return "↑" if one.direction(one.check({})) == "higher" else "↓"


def shown(one: Metric) -> list[str]:
    """What it says of a few maps of one photo."""
    photo = figures.scene(one.name)[0]
    lead = f"{photo}, {PICTURES}; `random` and `centre` are the controls."
    if one.name == "completeness":
        lead = f"{photo}, {PICTURES}: a method that promises to sum to the score (20 steps), and one that does not."
    if one.masks:
        lead += " The frame marks the object."
    values = figures.values(one.name)
    cards = [card(figures.marked(name, one.name), name, said, "../") for name, said in values.items()]
    said = [lead, gallery(cards)]
    if one.name in figures.ACROSS:
        file = figures.metric_figure(one.name)
        said.append(picture(file, f"Curves of {one.name} for a few methods", f"../metrics/{one.name}.webp"))
    return said


def standing(one: Metric) -> list[str]:
    """The best methods by it, and the controls."""
    title = "## On the leaderboard"
    boards = evidence.standings(one.name)
    if not boards:
        return [title, "Not part of [the leaderboard](../results.md)."]
    sign = -1 if one.direction(one.check({})) == "higher" else 1
    rows = ["| images | highest" if sign < 0 else "| images | lowest", " | random | centre |\n|---|---|---|---|"]
    table = ["".join(rows)]
    for pictures, values in boards:
        by = dict(values)
        ranked = sorted((v for v in values if v[0] not in ("random", "centre")), key=lambda v: sign * number(v[1]))
        first = ", ".join(f"[{name}](../methods/{bare(name)}.md) {value}" for name, value in ranked[:3])
        table.append(f"| {pictures} | {first} | {by['random']} | {by['centre']} |")
    return [title, "DeiT-Tiny; all methods: [results](../results.md).", "\n".join(table)]


def number(said: str) -> float:
    return float(said.split()[0])


# -------------------------------------------------------------------------------------------------------------- indices


def card(file: Path, name: str, said: str, up: str, link: str | None = None) -> str:
    """A small picture with its name; `up` leads to the root of the site's sources."""
    assert file.exists()
    label = f"[`{name}`]({link or f'{up}methods/{name}.md'})"
    return f'<figure markdown="span">\n![{name}]({up}gallery/{file.name})\n<figcaption markdown="span">{label} {said}</figcaption>\n</figure>'  # fmt: skip # noqa: E501


def gallery(cards: list[str]) -> str:
    return '<div class="gallery row" markdown>\n' + "\n".join(cards) + "\n</div>"


def index(kind: str, known: Any) -> str:
    """All of a kind, by family."""
    lead = {
        "Methods": f'Each method computes a map of what the model used. Its source is one function in one file.\n\n??? note "Notation of the formulas"\n\n    {formula.text(NOTATION)}',  # noqa: E501
        "Metrics": "A metric measures how good a map is, image by image, alongside the controls `random` and `centre`.",
    }[kind]
    said = [f"# {kind}", lead]
    for family, members in groupby(known.values(), key=lambda one: one.family):
        said += [f"## {family_name(family)}"]
        if kind == "Methods":
            rows = [
                f"| [`{one.name}`]({one.name}.md) | {one.summary} | {evidence.forwards(one.name) or '–'} |"
                for one in members
            ]
            said.append("\n".join(["| method | what it shows | cost |", "|---|---|---|", *rows]))
        else:
            rows = [f"| [`{one.name}`]({one.name}.md) {arrow(one.name)} | {one.summary} |" for one in members]
            said.append("\n".join(["| metric | what it measures |", "|---|---|", *rows]))
    if kind == "Methods":
        said.append("The cost is that of one image, in plain forward passes on a GPU ([results](../results.md)).")
    return "\n\n".join(said)


def nav_of(kind: str, known: Any) -> list[Any]:
    """The pages of a kind for the navigation, by family."""
    folder = kind.lower()
    groups: list[Any] = [{f"All {folder}": f"{folder}/index.md"}]
    for family, members in groupby(known.values(), key=lambda one: one.family):
        groups.append({family_name(family): [{one.name: f"{folder}/{one.name}.md"} for one in members]})
    return groups


def all_pages() -> dict[str, str]:
    """Every page made here, by its place in the site."""
    pages = {f"methods/{name}.md": method_page(one) for name, one in METHODS.items()}
    pages |= {f"metrics/{name}.md": metric_page(one) for name, one in METRICS.items()}
    return {**pages, "methods/index.md": index("Methods", METHODS), "metrics/index.md": index("Metrics", METRICS)}
