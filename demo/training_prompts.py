"""The prompts that the target is sampled with: templates filled with topics, drawn with a fixed seed."""

import random
from collections.abc import Callable

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def listed(text: str) -> list[str]:
    """The items of a text that separates them by semicolons; where its lines break is of no account."""
    return [item.strip() for item in text.replace("\n", " ").split(";")]


def as_chat(question: str) -> str:
    """One question in the target's chat template, up to where its answer begins."""
    return f"{TURN_START}system\n{SYSTEM}{TURN_END}\n{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def build_prompts(num_chat: int, num_plain: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Different chat prompts, and different openings of plain texts, the fixed ones first; as many as were asked for or
    as the templates give."""
    rng = random.Random(seed)
    chat = collect(num_chat, lambda: draw_chat(rng))
    plain = collect(num_plain - len(FIXED_OPENINGS), lambda: draw_plain(rng))
    return chat, FIXED_OPENINGS + [text for text in plain if text not in FIXED_OPENINGS]


def collect(count: int, draw: Callable[[], str]) -> list[str]:
    seen: dict[str, None] = {}
    tries = 0
    while len(seen) < count and tries < 20 * count:
        seen.setdefault(draw())
        tries += 1
    return list(seen)


def draw_chat(rng: random.Random) -> str:
    templates = rng.choices([QUESTIONS, STORY_QUESTIONS, CODE_QUESTIONS, SUMS], [0.74, 0.08, 0.11, 0.07])[0]
    return as_chat(fill(rng.choice(templates), rng))


def draw_plain(rng: random.Random) -> str:
    templates = rng.choices([OPENINGS, STORY_OPENINGS, OTHER_OPENINGS], [0.62, 0.08, 0.30])[0]
    return fill(rng.choice(templates), rng).strip(" ")


def fill(template: str, rng: random.Random) -> str:
    """Every value is drawn, whatever the template uses."""
    topic, other_topic = rng.sample(TOPICS, 2)
    character, other_character = rng.sample(CHARACTERS, 2)
    name, other_name = rng.sample(NAMES, 2)
    function = rng.choice(FUNCTIONS)
    return template.format(
        t=topic,
        u=other_topic,
        T=topic[0].upper() + topic[1:],
        s=character,
        s2=other_character,
        c=rng.choice(PROGRAMS),
        l=rng.choice(LANGUAGES),
        N=name,
        M=other_name,
        a=rng.randint(3, 120),
        b=rng.randint(20, 900),
        k=rng.randint(2, 12),
        d=rng.choice([5, 10, 15, 20, 25, 30, 40, 50]),
        r=rng.randint(1850, 2023),
        y=rng.choice(COUNTRIES),
        z=rng.choice(CITIES),
        o=rng.choice(COMPANIES),
        f=function,
        F=function.title().replace("_", ""),
    )


# ---- what the templates are filled with ------------------------------------------------------------------

TOPICS = listed("""
photosynthesis; gravity; black holes; the water cycle; plate tectonics; volcanoes; earthquakes; the solar system;
the moon; comets; the Big Bang; evolution; natural selection; DNA; cells; bacteria; viruses; vaccines; antibiotics;
the immune system; the human heart; the brain; sleep; dreams; memory; nutrition; vitamins; protein; exercise; yoga;
meditation; stress; anxiety; friendship; leadership; teamwork; time management; public speaking; negotiation;
job interviews; resumes; remote work; freelancing; entrepreneurship; marketing; branding; inflation; interest rates;
the stock market; budgeting; saving money; taxes; insurance; mortgages; cryptocurrency; supply and demand;
international trade; globalization; capitalism; democracy; the United Nations; the European Union; human rights;
the Roman Empire; ancient Egypt; ancient Greece; the Middle Ages; the Renaissance; the Industrial Revolution;
the French Revolution; the American Civil War; World War I; World War II; the Cold War; the Silk Road;
the printing press; the steam engine; electricity; magnetism; light; sound waves; nuclear energy; solar power;
wind turbines; batteries; electric cars; airplanes; rockets; satellites; bicycles; trains; bridges; skyscrapers;
architecture; urban planning; recycling; plastic pollution; climate change; deforestation; coral reefs; rainforests;
deserts; the Arctic; oceans; rivers; lakes; mountains; forests; wildflowers; gardening; composting; bees; butterflies;
ants; spiders; sharks; whales; dolphins; octopuses; penguins; eagles; owls; elephants; lions; tigers; wolves; bears;
cats; dogs; horses; cows; chickens; dinosaurs; fossils; chemistry; the periodic table; acids and bases; water;
carbon dioxide; oxygen; gold; iron; diamonds; physics; quantum mechanics; relativity; thermodynamics; mathematics;
algebra; geometry; calculus; statistics; probability; prime numbers; fractions; logic; computers; programming; Python;
JavaScript; databases; operating systems; computer networks; the internet; web browsers; search engines;
artificial intelligence; machine learning; neural networks; large language models; robotics; cloud computing;
cybersecurity; passwords; encryption; open source software; version control; unit testing; debugging; algorithms;
data structures; recursion; sorting; video games; chess; board games; football; basketball; tennis; swimming; running;
cycling; hiking; camping; fishing; skiing; surfing; the Olympic Games; music; jazz; classical music; the piano;
the guitar; the violin; singing; dancing; ballet; theater; movies; photography; painting; sculpture; drawing; poetry;
novels; fairy tales; mythology; Shakespeare; science fiction; detective stories; comic books; libraries; museums;
schools; universities; online learning; homework; exams; languages; English grammar; Spanish; translation; writing;
essays; journalism; advertising; social media; smartphones; television; radio; newspapers; coffee; tea; chocolate;
bread; pizza; pasta; rice; soup; salads; fruit; vegetables; cheese; eggs; cooking; baking; restaurants; farming;
organic food; fashion; shoes; jewelry; travel; hotels; airports; beaches; national parks; Paris; London; New York;
Tokyo; Rome; India; China; Japan; Brazil; Africa; Australia; Canada; Mexico; Germany; France; Italy; Spain; Russia;
family; parenting; weddings; birthdays; holidays; Christmas; Halloween; volunteering; charity; religion; philosophy;
ethics; happiness; love; courage; honesty; kindness; patience; creativity; curiosity; success; failure; motivation;
habits; goals; productivity; aging; childhood; health care; hospitals; nurses; doctors; dentists; police officers;
firefighters; teachers; engineers; scientists; artists; lawyers; pilots; chefs; farmers; weather; clouds; rain; snow;
thunderstorms; hurricanes; tornadoes; seasons; winter; summer; spring; autumn; time zones; calendars; maps; compasses;
microscopes; telescopes; thermometers; clocks; money; banks; credit cards; shopping; furniture; houses; apartments;
kitchens; tools
""")

CHARACTERS = listed("""
a brave mouse; an old lighthouse keeper; a lost robot; a curious child; a talking tree; a clumsy wizard;
a lonely dragon; a young pilot; a small village by the sea; a detective and her dog; a magic pencil;
a forgotten library; a traveler in the desert; two rival bakers; a girl who could talk to animals;
a boy who found a map; a king who could not sleep; a shy musician; a time traveler; a ship in a storm;
a fox and a crow; a farmer and his donkey; an astronaut alone on Mars; a haunted house; a secret garden;
a broken clock; a kind giant; a stubborn goat; the last train of the night; a painter who lost her colors;
a cat who wanted to be a lion; a snowman in spring; a teacher on her first day; a letter that arrived too late;
a boat made of paper; a city under the ocean; a very long night; a thief with a good heart;
an inventor and her machine; a family moving to a new country
""")

PROGRAMS = listed("""
reverses a string; checks whether a number is prime; computes the factorial of a number;
returns the nth Fibonacci number; finds the largest number in a list; counts the vowels in a string;
sorts a list of numbers; removes duplicates from a list; checks if a string is a palindrome; merges two sorted lists;
computes the greatest common divisor; converts Celsius to Fahrenheit; reads a file and counts its lines;
counts word frequencies in a text; computes the average of a list; flattens a nested list; performs binary search;
implements a stack; implements a queue; implements a linked list; validates an email address;
generates a random password; computes the sum of digits; finds the second largest element;
rotates a list by k positions; transposes a matrix; multiplies two matrices; checks balanced parentheses;
finds all anagrams in a list of words; parses a CSV file; downloads a web page; writes a dictionary to a JSON file;
computes the distance between two points; converts a number to binary; finds the longest word in a sentence;
groups items by a key; computes compound interest; simulates rolling two dice; draws a triangle of stars;
prints a multiplication table; finds missing numbers in a sequence; implements bubble sort; implements quicksort;
implements a simple calculator; counts the words in a sentence; capitalizes each word
""")

NAMES = listed("""
Anna; Ben; Clara; David; Emma; Frank; Grace; Henry; Ines; Jack; Karen; Leo; Maria; Nora; Oscar; Paula; Quinn; Rosa;
Sam; Tina; Uma; Victor; Wendy; Yusuf; Zoe; John; Mary; Peter; Susan; Ahmed
""")

COUNTRIES = listed("""
France; Germany; Spain; Italy; Japan; China; India; Brazil; Canada; Mexico; Egypt; Kenya; Nigeria; Australia; Norway;
Sweden; Poland; Greece; Turkey; Argentina; Peru; Chile; Vietnam; Thailand; Portugal; Ireland; Russia; Iran; Indonesia;
South Africa
""")

CITIES = listed("""
San Francisco; Paris; London; New York; Tokyo; Berlin; Rome; Madrid; Chicago; Boston; Seattle; Mumbai; Cairo; Sydney;
Toronto; Amsterdam; Vienna; Prague; Istanbul; Moscow; Beijing; Seoul; Bangkok; Lisbon; Dublin
""")

COMPANIES = listed("""
Facebook; Google; Apple; Microsoft; Amazon; Netflix; Twitter; IBM; Intel; Toyota; Sony; Samsung; Nike; Tesla; Disney;
Ford; Boeing; Nokia; Oracle; Wikipedia; YouTube; Starbucks
""")

LANGUAGES = listed("""
Python; JavaScript; Java; C++; C; Rust; Go; Ruby; TypeScript; SQL; Bash; Swift; Kotlin
""")

FUNCTIONS = listed("""
add; factorial; fibonacci; is_prime; reverse_string; sort_list; count_words; load_data; train_model; parse_args;
get_user; find_max; binary_search; merge; read_file; compute_mean
""")

# ---- templates: questions of a chat --------------------------------------------------------------------

QUESTIONS = [
    "Explain {t} in simple terms.",
    "What is {t}?",
    "What are {t}? Give a short answer.",
    "Tell me about {t}.",
    "Why is {t} important?",
    "How does {t} work?",
    "Give me five interesting facts about {t}.",
    "List ten things everyone should know about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "Write a short paragraph about {t}.",
    "Write a poem about {t}.",
    "Write a haiku about {t}.",
    "Write a short story about {t}.",
    "Write a blog post introduction about {t}.",
    "Explain {t} to a five year old.",
    "Explain {t} to a college student.",
    "Summarize the history of {t}.",
    "Summarize the most important ideas about {t} in three sentences.",
    "What is the difference between {t} and {u}?",
    "Compare {t} and {u}.",
    "How is {t} related to {u}?",
    "Which is more important, {t} or {u}?",
    "Give me tips for learning about {t}.",
    "What are some common misconceptions about {t}?",
    "Create a quiz with three questions about {t}.",
    "Write a dialogue between two friends about {t}.",
    "Write an email to my manager about {t}.",
    "Write a letter to a friend about {t}.",
    "Write a product description related to {t}.",
    "Write a tweet about {t}.",
    "Write a news headline and a short article about {t}.",
    "Plan a lesson about {t}.",
    "Make an outline for an essay on {t}.",
    "Write the first paragraph of an essay on {t}.",
    "What would happen without {t}?",
    "Who made important contributions to {t}?",
    "When did {t} become popular?",
    "What is the future of {t}?",
    "Give a step-by-step guide to getting started with {t}.",
    "What questions should I ask about {t}?",
    "Can you recommend books about {t}?",
    'Translate the sentence "I like {t}" into French.',
    "Define {t} and give an example.",
    'Use the word "{t}" in three sentences.',
    "Write a motivational speech about {t}.",
    "Write a song about {t}.",
    "Tell me a joke about {t}.",
    "Describe {t} using the five senses.",
    "Write a table of pros and cons of {t}.",
    "I don't understand {t}. Can you help me?",
    "Hi! Can you teach me something about {t}?",
    "I have a presentation on {t} tomorrow. What should I say?",
    'Rewrite this sentence to be more formal: "{T} is really cool and I think you should check it out."',
    'Rewrite this text in a friendlier tone: "You must read the report on {t} before the meeting."',
    'Correct the grammar: "he don\'t know nothing about {t} and {u}."',
    (
        'Summarize this text: "{T} has changed a lot over the years. Many people now think it is connected '
        'to {u}. Experts disagree about the reasons, but most say that more research is needed."'
    ),
    'Is this statement true or false, and why: "{T} was invented in the 20th century."',
    "What is the first thing that comes to mind when you hear {t}?",
    "You are a teacher. Introduce {t} to your class.",
    "Pretend you are a tour guide and talk about {t}.",
    "Brainstorm ideas for a project about {t}.",
    'Extract the key words from: "{T}, {u} and their effects on society".',
    'Continue this text: "When I first heard about {t}, I"',
    "Write a conclusion for an article about {t} and {u}.",
    "What do experts say about {t}?",
    "Give me a fun fact about {t} and another about {u}.",
]

STORY_QUESTIONS = [
    "Write a short story about {s}.",
    "Tell me a bedtime story about {s}.",
    "Write the opening of a novel about {s}.",
    "Write a poem about {s}.",
    "Write a fairy tale about {s} with a surprising ending.",
    "Describe {s} in one paragraph.",
    "Write a funny story about {s} and {s2}.",
    "Invent a title and a short summary for a movie about {s}.",
]

CODE_QUESTIONS = [
    "Write a Python function that {c}.",
    "Write a {l} function that {c}.",
    "How do I write a program that {c} in {l}?",
    "Write a {l} program that {c}, and explain how it works.",
    "Write unit tests for a Python function that {c}.",
    "Explain the algorithm of a function that {c}.",
]

SUMS = [
    "What is {a} + {b}?",
    "What is {a} times {b}?",
    "A train travels {a} miles in {k} hours. What is its average speed?",
    "{N} has {a} apples and gives {k} to a friend. How many are left?",
    "If a shirt costs ${a} and is {d}% off, what is the sale price?",
    "Solve for x: {k}x + {a} = {b}.",
    "What is {d}% of {b}?",
    "A rectangle is {a} cm long and {k} cm wide. What is its area?",
    "Is {a} a prime number?",
    "List the first {k} multiples of {d}.",
    "{N} reads {k} pages a day. How long does a book of {b} pages take?",
    "Convert {a} kilometers to miles.",
]

# ---- templates: openings of plain texts ----------------------------------------------------------------

# The prompts of tests/full_tests/spec_decode.py, always among those trained on.
FIXED_OPENINGS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "San Francisco is know for its",
    "Facebook was created in 2004 by",
    "Curious George is a",
    "Python 3.11 brings improvements to its",
]

OPENINGS = [
    "{T} is",
    "{T} are",
    "The history of {t} begins",
    "The most important thing about {t} is",
    "In this article, we will discuss {t}",
    "Many people believe that {t}",
    "When it comes to {t},",
    "# {T}\n\n",
    "## Introduction to {t}\n\n",
    "Q: What is {t}?\nA:",
    "One of the main reasons for {t} is",
    "According to a recent study on {t},",
    "{T} and {u}",
    "The relationship between {t} and {u}",
    "Chapter 1: {T}\n\n",
    "Here are some facts about {t}:\n\n1.",
    "The best way to learn about {t} is to",
    "In recent years, {t}",
    "Scientists who study {t} have",
    "My favorite thing about {t}",
    "For thousands of years, {t}",
    "The future of {t} is",
    "Abstract. We study {t}",
]

STORY_OPENINGS = [
    "Once upon a time, there was {s}",
    "This is the story of {s}.",
    "It was a cold night when {s}",
    "Nobody in the town had ever seen {s}",
    '"Look!" cried the boy. It was {s}',
]

OTHER_OPENINGS = [
    "Hello, my name is {N} and I",
    "My name is {N}. I am",
    "{N} is a",
    "{N} was born in",
    "The capital of {y} is",
    "The president of {y} is",
    "The population of {y} is",
    "{z} is known for its",
    "{z} is a city in",
    "The weather in {z} today is",
    "{o} was founded in {r} by",
    "{o} is a company that",
    "In {r}, {o}",
    "In {r}, {y}",
    "{l} is a programming language",
    "{l} 3.{k} brings improvements to its",
    "def {f}(",
    "import numpy as np\n\ndef {f}(",
    "function {f}(",
    "class {F}:\n    def __init__(self",
    "Dear {N},\n\n",
    "{N}: Hi, how are you?\n{M}:",
    "Ingredients:\n- {k} cups of",
    "The year was {r}, and {N}",
    '"I can\'t believe it," said {N}.',
    "To install {l}, you",
]

# ---- for the evaluation ----------------------------------------------------------------------------------

# Questions that share no template with those above: a second set held out, and a harder one.
OUT_OF_TEMPLATE = [
    "My houseplant's leaves are turning yellow at the edges. What could be going on?",
    "How long should I boil an egg if I want the yolk soft?",
    "Name three countries that border Switzerland and say one thing about each.",
    "I'm feeling a bit down today.",
    "Which weighs more, a kilo of feathers or a kilo of steel?",
    "Please turn these notes into a polite message: meeting moved, 3pm, room 4, bring laptop.",
    "What does 'break the ice' mean?",
    "Why do we yawn?",
    "Give me a regular expression that matches a date such as 2024-05-17.",
    "What's a good name for a coffee shop run by two sisters?",
    "I have chicken, rice and broccoli. What can I make for dinner?",
    "How do I center a div in CSS?",
    "Who wrote Pride and Prejudice, and what is it about?",
    "What's the difference between 'affect' and 'effect'?",
    "Can you help me plan a three-day trip to Lisbon?",
    "Why is the sky blue at noon but red at sunset?",
    "My code raises IndexError: list index out of range. What should I check?",
    "Suggest a workout I can do at home in twenty minutes.",
    "Sort these words alphabetically: pear, apple, fig, cherry, banana.",
    "What should I look for when I buy a used car?",
    "Tell me what a hash table is and when I would use one.",
    "Is it safe to leave a laptop plugged in all night?",
    "Write a thank-you note to a neighbor who fed my cat.",
    "How many days are there between March 3 and April 10?",
    "What is the plot of Romeo and Juliet?",
    "Could you proofread this: 'Their going to the store tommorow.'",
    "How do vaccines teach the body to fight a disease?",
    "What's the opposite of 'generous'?",
    "Give me a one-line shell command that counts the files in a folder.",
    "I want to learn the guitar but I have no time. Any advice?",
    "Explain what a mortgage is as if I had never had a bank account.",
    "List the planets from largest to smallest.",
    "What happens if I mix baking soda and vinegar?",
    "How should I answer 'What is your greatest weakness?'",
    "Make up a riddle whose answer is 'a shadow'.",
    "Why did the Titanic sink?",
    "What is the square root of 144, and how can I check it?",
    "Draft an apology to a customer whose parcel arrived late.",
    "What are good manners at a dinner in Japan?",
    "How can I tell if an avocado is ripe?",
]
