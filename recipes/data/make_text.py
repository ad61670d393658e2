"""Writes lighthouse.txt: a keeper's log in verse and prose, about 40 KB, the same on every machine.

    python recipes/data/make_text.py > recipes/data/lighthouse.txt

Small on purpose and full of repetition, so that a tiny model's loss falls within a few dozen steps.
"""

import random
import sys

NUM_ENTRIES = 110
POEM = """\
The lamp is lit, the night is long,
the tide goes out, the tide comes in,
the wind has words to every song
and where they end the waves begin.

I count the ships, I wind the clock,
I write the weather and the hour;
the sea writes too, upon the rock,
and reads it back below the tower.

Who keeps the light is kept by it,
a small round room, a turning flame;
the dark is wide, the lamp is lit,
and no two nights are quite the same.
"""
WORDS = {
    "wind": ["north", "north-west", "west", "south-west", "south", "east"],
    "force": ["light", "steady", "fresh", "strong", "still"],
    "sea": ["calm", "grey", "green", "rough", "white with foam", "flat as slate"],
    "sky": ["clear", "low cloud", "rain before noon", "fog until evening", "stars all night"],
    "ship": ["a collier", "a brig", "two herring boats", "the mail packet", "a schooner",
             "a pilot"],
    "went": ["passed to the north", "lay at anchor", "stood out to sea", "ran for the harbour",
             "signalled and went on", "waited for the tide"],
    "task": ["trimmed the wick", "cleaned the lens", "wound the clockwork", "painted the rail",
             "carried oil up the stair", "mended the gutter", "wrote to the board"],
    "saw": ["a seal on the ledge", "gulls over the reef", "a whale far off", "the first swallows",
            "a bottle with no letter", "lightning in the south"],
    "felt": ["The tower hummed in the gusts.", "The stair was cold.", "The kettle sang.",
             "I slept little.", "All is well.", "The light burned true."],
}  # fmt: skip
FORMS = [
    "Wind {wind}, {force}; sea {sea}; {sky}. {Ship} {went}. I {task}. {felt}",
    "The wind came {force} from the {wind} and the sea was {sea}. I {task} and {task}. {felt}",
    "{Ship} {went} at dusk. Saw {saw}. {felt} {felt}",
    "{sky_cap}. Wind {wind}. I {task}, then {task}. Saw {saw}. {felt}",
]
SECONDS = ["the tide goes out, the tide comes in,", "I count the ships, I wind the clock,",
           "the dark is wide, the lamp is lit,", "the wind has words to every song,"]  # fmt: skip


def text(seed: int = 1) -> str:
    """The whole log: the poem, then dated entries with a line of the poem now and then."""
    number = random.Random(seed).random  # this sequence is the same in every Python

    def one(choices):
        return choices[int(number() * len(choices))]

    def fill(form):
        while "{" in form:
            name = form[form.index("{") + 1 : form.index("}")]
            key = name.lower().removesuffix("_cap")
            word = one(WORDS[key])
            word = word[0].upper() + word[1:] if name != key else word
            form = form.replace("{" + name + "}", word, 1)
        return form

    parts = ["THE KEEPER'S LOG\n\n" + POEM]
    for day in range(1, NUM_ENTRIES + 1):
        lines = [f"Night {day}."] + [fill(one(FORMS)) for _ in range(2 + int(number() * 2))]
        if day % 5 == 0:
            lines.append(f"    {one(SECONDS)}\n    {one(SECONDS)[:-1]}.")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) + "\n" + POEM


if __name__ == "__main__":
    sys.stdout.write(text())
