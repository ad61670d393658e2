"""The page of a prediction: whole, and harmless whatever the slices' labels say."""

import html.parser
import json

from megatron_prism.cli import main as cli


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


TEXT = """prism-program 1
world size=8 tp=2 pp=2
group <script>alert(1)</script> 0,1,2,3,4,5,6,7
program ranks=0-3
0F compute ns=10ms
0F all_reduce <script>alert(1)</script> bf16 n=4096 reduce=sum
program ranks=4-7
0F compute ns=20ms
0F all_reduce <script>alert(1)</script> bf16 n=4096 reduce=sum
"""


def test_the_page_is_whole_and_harmless(tmp_path, capsys):
    source, page = tmp_path / "w.txt", tmp_path / "page.html"
    source.write_text(TEXT)
    words = ["predict", str(source), "--samples", "200", "--html", str(page)]
    status = cli.main(words)
    said = capsys.readouterr()
    assert status == 0, said.err
    text = page.read_text()
    tags = Page(text).tags
    names = {tag for tag, _ in tags}
    assert not names & {"img", "link", "iframe"}
    assert "<script>alert" not in text
    assert not any(key.startswith("on") or key in ("src", "href") for _, a in tags for key in a)
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["classes"] == {"0": "stage 0", "1": "stage 1"}
    assert cli.main(words) == 2  # there already
    assert cli.main([*words, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"] == 2
