"""Make the pictures of README and docs: ``python docs/screenshots.py`` (needs Chromium).

Captures the main recipe, replays it, and takes the page's picture in light and in dark.  With pages
(``python docs/screenshots.py replay.html hang.html``) their pictures are taken instead: every tab,
1,400 and 390 pixels wide, in light and in dark, beside the page.  An error on a page's console, or
text that overlaps, ends the command with status 1.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape

import megatron_prism as prism
from megatron_prism.report.page import allow_script

RECIPE = "llama3-70b_1024gpu_tp8pp4vp5_h200"
PICTURES = pathlib.Path(__file__).parent / "images"
SCHEMES = {"dark": 0, "light": 1}  # Chromium's preferredColorScheme
WIDTHS, HEIGHT = (1400, 390), 880  # pixels

# In a page: visits every tab and says what is wrong there, text that is cut off or overlaps.
INSPECTOR = """
addEventListener("load", () => {
  const wrong = [];
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  const boxes = (name, nodes) => {
    const all = [...nodes].map((node) => [node.getBoundingClientRect(), node.textContent])
      .filter(([box]) => box.width);
    all.forEach(([a, one], i) => all.slice(i + 1).forEach(([b, other]) => {
      if (over(a, b)) wrong.push(`${name}: ${one} overlaps ${other}`);
    }));
  };
  const seen = [...document.querySelectorAll("#tabs [role=tab]")].map((button) => {
    button.click();
    const name = button.textContent;
    const section = document.querySelector("main > section:not([hidden])");
    for (const node of document.body.querySelectorAll("*")) {
      const box = node.getBoundingClientRect();
      if (box.width && (box.left < -1 || box.right > innerWidth + 1))
        wrong.push(`${name}: ${node.tagName} ${node.textContent.slice(0, 40)} is too wide`);
    }
    for (const svg of section.querySelectorAll("svg")) boxes(name, svg.querySelectorAll("text"));
    boxes(name, section.children);
    for (const node of document.querySelectorAll(".card, .card div, .who"))
      if (node.scrollWidth > node.clientWidth + 1)
        wrong.push(`${name}: ${node.textContent} is cut`);
    if (!section.textContent.trim()) wrong.push(`${name}: empty`);
    return button.id.slice(4);
  });
  boxes("cards", document.querySelectorAll(".card"));
  parent.postMessage([location.pathname, innerWidth, seen, wrong], "*");
});
"""
# Around the pages: collects what they say.
COLLECTOR = """
const said = [];
addEventListener("message", (event) => {
  said.push(event.data);
  document.body.dataset.said = JSON.stringify(said);
});
"""


def browse(address: str, width: int, scheme: str, *words: str) -> tuple[str, list[str]]:
    """(what Chromium prints, errors on the console) of a page in a window so wide."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here\n  fix: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        given = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        given += [f"--window-size={width},{HEIGHT}", f"--user-data-dir={profile}"]
        given += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        given += ["--enable-logging=stderr", *words, address]
        done = subprocess.run(given, check=True, capture_output=True, text=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def picture(page: pathlib.Path, to: pathlib.Path, scheme: str, width: int, tab: str = "") -> None:
    """Write a PNG of a tab of ``page`` as a browser shows it, in a frame: windows have a least
    width."""
    address = page.resolve().as_uri() + (f"#/{tab}" if tab else "")
    with tempfile.NamedTemporaryFile("w", suffix=".html") as around:
        around.write(f'<body style="margin:0"><iframe style="border:0" width="{width}" '
                     f'height="{HEIGHT}" src="{address}"></iframe>')  # fmt: skip
        around.flush()
        browse(pathlib.Path(around.name).as_uri(), width, scheme, f"--screenshot={to}")


def inspect(
    sources: dict[str, str], scheme: str
) -> tuple[dict[tuple[str, int], list[str]], list[str]]:
    """((page, width) -> its tabs, what is wrong) of pages; one browser shows all of them."""
    with tempfile.TemporaryDirectory() as folder:
        frames = [f"<!doctype html><body><script>{COLLECTOR}</script>"]
        for place, source in enumerate(sources.values()):
            page = pathlib.Path(folder) / f"{place}.html"
            page.write_text(allow_script(source, INSPECTOR), encoding="utf-8")
            frames += [
                f'<iframe width="{w}" height="{HEIGHT}" src="{page.name}"></iframe>' for w in WIDTHS
            ]
        index = pathlib.Path(folder) / "index.html"
        index.write_text("\n".join(frames), encoding="utf-8")
        out, wrong = browse(
            index.as_uri(), 1600, scheme, "--virtual-time-budget=5000", "--dump-dom"
        )
    said = re.search(r'data-said="([^"]*)"', out)
    names, tabs = list(sources), {}
    for path, width, seen, found in json.loads(unescape(said[1])) if said else []:
        name = names[int(pathlib.PurePath(path).stem)]
        tabs[name, width] = seen
        wrong += [f"{name}, {width} pixels, {scheme}: {one}" for one in found]
    asked = {(name, width) for name in names for width in WIDTHS}
    return tabs, wrong + [f"{page}: its scripts did not end" for page in sorted(asked - set(tabs))]


def album(pages: list[pathlib.Path]) -> list[str]:
    """Pictures of every tab of pages, beside them; what is wrong there."""
    all_wrong = []
    for scheme in SCHEMES:
        tabs, wrong = inspect(
            {str(page): page.read_text(encoding="utf-8") for page in pages}, scheme
        )
        all_wrong += wrong
        for (name, width), seen in tabs.items():
            page = pathlib.Path(name)
            for tab in seen:
                to = page.with_name(f"{page.stem}-{tab}-{width}-{scheme}.png")
                picture(page, to, scheme, width, tab)
    return all_wrong


def main() -> None:
    if sys.argv[1:]:
        sys.exit("\n".join(album([pathlib.Path(name) for name in sys.argv[1:]])) or None)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        programs = prism.capture(RECIPE, pathlib.Path(folder) / "slices")
        page = pathlib.Path(folder) / "replay.html"
        page.write_text(prism.replay(programs, machine="h200").to_html(), encoding="utf-8")
        for scheme in SCHEMES:
            picture(page, PICTURES / f"replay-{scheme}.png", scheme, WIDTHS[0])


if __name__ == "__main__":
    main()
