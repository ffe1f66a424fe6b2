"""Prompts of many kinds, since the largest value of a layer may come with any of them."""

from __future__ import annotations

_STORY = (
    "The lighthouse keeper wrote down the weather every morning, whether or not anybody would read it. On the first "
    "of March the wind came from the north-west and two boats went out. On the second there was fog until noon, and "
    "he rang the bell each minute, counting the strokes on his fingers. On the third a letter arrived, the first in a "
    "month. He put it on the table, made tea, and sat looking at the handwriting for a long time. Then he opened it:"
)
_REPORT = (
    "Quarterly report. Revenue rose by 4.2% to 318.6 million, mostly because of new contracts in the second half of "
    "the quarter. Costs rose by 2.9%. The number of employees was 1,204 at the end of the period (a year ago 1,187). "
    "The board proposes a dividend of 0.35 per share. Risks: exchange rates, the price of copper, delays at two sites. "
    "Outlook: management expects growth between 3% and 5%. Summary in three sentences:"
)
_CODE = (
    "class LruCache:\n"
    '    """Keeps the items that were used last."""\n\n'
    "    def __init__(self, capacity: int) -> None:\n"
    "        self.capacity = capacity\n"
    "        self.items: dict[str, object] = {}\n\n"
    "    def get(self, key: str) -> object | None:\n"
    "        if key not in self.items:\n"
    "            return None\n"
    "        value = self.items.pop(key)\n"
    "        self.items[key] = value\n"
    "        return value\n\n"
    "    def put(self, key: str, value: object) -> None:\n"
)
_TABLE = "| city | country | people |\n| --- | --- | --- |\n" + "".join(
    f"| {city} | {country} | {people} |\n"
    for city, country, people in [
        ("Oslo", "Norway", "709,000"),
        ("Lima", "Peru", "10,092,000"),
        ("Accra", "Ghana", "2,514,000"),
        ("Porto", "Portugal", "231,800"),
        ("Osaka", "Japan", "2,753,000"),
    ]
)
_LOG = "".join(
    f"2024-05-{day:02d}T0{hour}:15:{second:02d}Z worker-{day % 4} {level} job {1000 + 37 * day} {what}\n"
    for day, hour, second, level, what in [
        (1, 2, 11, "INFO", "started"),
        (1, 3, 48, "INFO", "finished in 5,581 ms"),
        (2, 2, 9, "INFO", "started"),
        (2, 2, 57, "WARNING", "queue is 93% full"),
        (3, 4, 30, "ERROR", "connection reset by peer (104)"),
        (4, 2, 12, "INFO", "started"),
    ]
)

PROMPTS = [
    "The capital of France is",
    "Explain in simple words why the sky is blue and sunsets are red.",
    "Write a short poem about a river in winter.",
    "What is the difference between a virus and a bacterium?",
    "def merge_sorted(left, right):\n    ",
    "Once upon a time there was a clockmaker who could not sleep.",
    "List ten animals that live in the sea:\n1.",
    "Translate to French: The meeting was moved to Thursday afternoon.",
    "Translate to German: Could you tell me where the station is?",
    "Q: A train goes 180 km in 2.5 hours. What is its average speed?\nA:",
    "Solve for x: 3x + 7 = 2(x - 4) + 21. Show every step.",
    "SELECT customer, SUM(amount) AS total FROM orders WHERE",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "<html>\n<head><title>Opening hours</title></head>\n<body>\n<table>",
    "#include <stdio.h>\n\nint main(int argc, char **argv) {",
    "import numpy as np\n\ndef softmax(x):\n",
    "Dear Ms Keller,\n\nthank you for your letter of 12 April. Unfortunately",
    "To bake a simple loaf of bread you need flour, water, salt and yeast. First,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D",
    "2 + 2 = 4\n3 + 5 = 8\n12 + 19 = 31\n48 + 77 =",
    "Im Jahr 1866 fuhr die erste Strassenbahn durch die Stadt, und",
    "La historia de la ciudad comienza en un pequeño puerto donde",
    "Le chat dort sur le toit. Le chien dort sous la table. La souris",
    "東京は日本の首都で、人口は",
    "Москва - столица России. Санкт-Петербург",
    "北京是中华人民共和国的首都,",
    "القاهرة هي عاصمة مصر و",
    "Emoji: 😀 😃 😄 😁 and what they stand for:",
    "Shakespeare wrote: To be, or not to be, that is the question: Whether 'tis nobler",
    "In 1969, the first humans walked on the Moon. Before that,",
    "Compare electric cars with petrol cars: price, range, upkeep.",
    "Give me three arguments for and three against working from home.",
    "Summarise: The committee met four times, heard nine experts, and came to no conclusion.",
    "Rewrite politely: Send me the file now.",
    "What are the side effects of too much caffeine?",
    "Name the planets of the solar system in order, with one fact for each.",
    "Who wrote Don Quixote, and what is the book about?",
    "Write a regular expression that matches dates such as 2024-05-17.",
    "Explain recursion to a ten year old.",
    "Describe how a bill becomes a law.",
    "The patient presents with fever, cough and shortness of breath. The differential diagnosis includes",
    "This agreement is made between the Landlord and the Tenant. 1. The Landlord lets the flat on the second floor",
    "git commit -m 'Fix off-by-one error in",
    "$ ls -la /usr/share\ntotal 1200\ndrwxr-xr-x",
    "\\begin{theorem} Let $G$ be a group of order $p^2$, $p$ prime. Then it is abelian. \\end{theorem}\n",
    "C(=O)(O)c1ccccc1OC(C)=O is the SMILES string of",
    "E = mc^2 means that",
    "Player 1: rock. Player 2: paper. Winner: Player 2.\nPlayer 1: scissors. Player 2: paper. Winner:",
    "     *\n    ***\n   *****\n  *******\n",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "!!! ??? ... --- ,,, ;;; ::: ((( ))) [[[ ]]] {{{ }}}",
    "0.1 0.01 0.001 0.0001 1e-5 1e-6 6.02214076e23 -273.15 3.14159265358979",
    "x",
    _STORY,
    _REPORT,
    _CODE,
    _TABLE,
    _LOG,
    _STORY + "\n\n" + _REPORT,
    _CODE + "\n\n# The same in Rust:\n",
    _TABLE + "\nAs JSON:\n",
]
