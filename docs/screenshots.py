"""Make the pictures of README and docs: ``python docs/screenshots.py`` (needs Chromium).

Captures the main recipe, replays it, and takes the page's picture in light and in dark.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import megatron_prism as prism

RECIPE = "llama3-70b_1024gpu_tp8pp4vp5_h200"
PICTURES = pathlib.Path(__file__).parent / "images"
SCHEMES = {"dark": 0, "light": 1}  # Chromium's preferredColorScheme
WIDTH, HEIGHT = 1400, 880  # pixels


def picture(page: pathlib.Path, to: pathlib.Path, scheme: str) -> None:
    """Write a PNG of ``page`` as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here\n  fix: apt-get install chromium")
    words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={to}"]
    words += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", page.as_uri()]
    subprocess.run(words, check=True, capture_output=True)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        programs = prism.capture(RECIPE, pathlib.Path(folder) / "slices")
        page = pathlib.Path(folder) / "replay.html"
        page.write_text(prism.replay(programs, machine="h200").to_html(), encoding="utf-8")
        for scheme in SCHEMES:
            picture(page, PICTURES / f"replay-{scheme}.png", scheme)


if __name__ == "__main__":
    main()
