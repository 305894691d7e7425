"""What a number looks like: three colour maps, their limits, and one line colour per method.

signed     blue (against) – neutral – orange (evidence), equally far in OKLab for equal steps, darker outwards
unsigned   magma, zero at the dark end (the lowest value where zero means nothing)
control    grey
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap

from vitreous.registry import METHODS

PERCENTILE = 99.5
LINES = ("#332288", "#D55E00", "#44AA99", "#AA4499", "#E69F00", "#33BBEE", "#882255", "#661100")
LINE_CONTROL = "#8A8F98"
SPREAD = 13696  # under this number the methods that are compared most often have different line colours
MIDDLE = 0.965  # lightness of the neutral middle


def oklch(lightness: np.ndarray, chroma: np.ndarray, hue: np.ndarray) -> np.ndarray:
    """OKLCh (hue in degrees) to sRGB in 0…1, [… 3]."""
    a, b = chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))
    cone = np.stack(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ],
        -1,
    )
    linear = cone**3 @ np.array(
        [
            [4.0767416621, -1.2684380046, -0.0041960863],
            [-3.3077115913, 2.6097574011, -0.7034186147],
            [0.2309699292, -0.3413193965, 1.7076147010],
        ]
    )
    linear = linear.clip(0, 1)
    return np.asarray(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


def arm(lightness: float, chroma: float, hue: tuple[float, float], steps: int = 129) -> np.ndarray:
    """From the neutral middle to one end: lightness falls evenly, colour comes early."""
    t = np.linspace(0, 1, steps)
    return oklch(MIDDLE + (lightness - MIDDLE) * t, chroma * np.sin(t * np.pi / 2), hue[0] + (hue[1] - hue[0]) * t)


AGAINST = arm(0.47, 0.14, (245.0, 253.0))
EVIDENCE = arm(0.64, 0.165, (68.0, 51.0))
SIGNED = ListedColormap(np.concatenate([AGAINST[:0:-1], EVIDENCE]), "vitreous_signed")
UNSIGNED = colormaps["magma"]
CONTROL = ListedColormap(np.repeat(np.linspace(0.04, 0.97, 256)[:, None], 3, 1), "vitreous_control")


def colour_map(signed: bool, control: bool = False) -> Colormap:
    """The colours of a map."""
    return CONTROL if control else SIGNED if signed else UNSIGNED


def limits(map: np.ndarray, signed: bool, level: bool = False) -> tuple[float, float]:
    """Where the colours end: never the same number twice, whatever the map holds; a level begins at its lowest."""
    values = np.asarray(map, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        values = np.zeros(1)
    if signed:
        size = np.abs(values)
        end = float(np.percentile(size, PERCENTILE)) or float(size.max()) or 1.0
        return -end, end
    least, end, top = float(values.min()), float(np.percentile(values, PERCENTILE)), float(values.max())
    low = least if level and top > least else min(0.0, least)
    if end > low:
        return low, end
    return low, top if top > low else 0.0 if low < 0 else 1.0


def ends_of(map: np.ndarray, signed: bool, given: tuple[float, float] | None) -> tuple[float, float]:
    """The limits to draw with: the map's own or the given ones, around zero where the map has a sign."""
    if given is None:
        return limits(map, signed)
    size = max(abs(given[0]), abs(given[1])) or 1.0
    return (-size, size) if signed else given


def scale(map: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Values between the limits to 0…1, the rest clipped."""
    low, high = ends
    return np.clip((np.asarray(map, np.float64) - low) / (high - low if high > low else 1.0), 0, 1)


def is_control(method: str) -> bool:
    """Whether a method is a control that knows nothing of the model."""
    name = method.partition(" ")[0]  # without the options of a row of a leaderboard
    return name in METHODS and METHODS[name].family == "control"


def is_level(method: str) -> bool:
    """Whether only differences within a map of this method mean something, not its zero."""
    return method in METHODS and METHODS[method].level


def line_colour(method: str) -> str:
    """A method's colour in every chart; it depends on the name alone, so it stays when methods are added."""
    return LINE_CONTROL if is_control(method) else LINES[crc32(f"{SPREAD}{method}".encode()) % len(LINES)]
