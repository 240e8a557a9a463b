"""Prompts written from templates: instructions over topics, grade-school maths, JSON output.

Every source is an endless-enough list in a fixed order: the same seed gives the same prompts in every process. The
key of a prompt (its topic, its story) decides on which side of the train / held-out split it falls, so that no
topic is on both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator

TOPICS = (
    "the water cycle", "photosynthesis", "black holes", "volcanoes", "plate tectonics", "the moon landing",
    "the French Revolution", "ancient Egypt", "the Roman Empire", "the Silk Road", "the printing press",
    "the Industrial Revolution", "the Great Wall of China", "the Renaissance", "Viking ships", "medieval castles",
    "the invention of the telephone", "electric cars", "solar panels", "wind turbines", "nuclear energy",
    "hydrogen fuel", "recycling plastic", "composting at home", "urban gardening", "growing tomatoes", "keeping bees",
    "pruning roses", "raising chickens", "training a puppy", "caring for a cat", "keeping an aquarium",
    "bird watching", "hiking safely", "camping in the rain", "learning to swim", "running a marathon",
    "stretching before exercise", "yoga for beginners", "playing chess", "learning the guitar", "singing in a choir",
    "watercolour painting", "digital photography", "baking sourdough bread", "cooking rice",
    "making pasta from scratch", "brewing coffee", "choosing a good tea", "eating more vegetables",
    "planning weekly meals", "saving money on groceries", "making a household budget", "paying off debt",
    "compound interest", "the stock market", "inflation", "starting a small business", "writing a business plan",
    "negotiating a salary", "preparing for a job interview", "writing a cover letter", "working from home",
    "managing time", "running a good meeting", "giving feedback", "resolving a conflict", "public speaking",
    "learning a new language", "taking notes in class", "studying for an exam", "reading faster",
    "writing a short story", "writing poetry", "keeping a diary", "the history of jazz", "classical music", "hip hop",
    "film noir", "animation", "theatre lighting", "museum visits", "modern architecture", "building a birdhouse",
    "fixing a leaking tap", "painting a room", "insulating a house", "choosing a mattress", "sleeping well",
    "drinking enough water", "the human heart", "the immune system", "vaccines", "antibiotics", "vitamins",
    "first aid", "migraine", "allergies", "dental care", "eye exams", "mental health", "meditation", "friendship",
    "family traditions", "raising teenagers", "teaching children to read", "playground games", "board games",
    "video games", "virtual reality", "artificial intelligence", "machine learning", "neural networks", "databases",
    "version control", "unit testing", "cyber security", "choosing passwords", "phishing emails",
    "open source software", "the internet", "web browsers", "mobile apps", "cloud computing", "3D printing",
    "robots in factories", "self-driving buses", "drones", "satellites", "the speed of light", "gravity", "magnetism",
    "sound waves", "rainbows", "lightning", "tornadoes", "earthquakes", "coral reefs", "rainforests", "deserts",
    "glaciers", "the Amazon river", "Mount Everest", "the Sahara", "Antarctica", "whales", "sharks", "octopuses",
    "elephants", "wolves", "penguins", "butterflies", "ants", "spiders", "dinosaurs", "fossils", "gemstones",
    "gold mining", "the periodic table", "acids and bases", "crystals", "prime numbers", "probability", "fractions",
    "geometry in nature", "the Fibonacci spiral", "statistics in sports", "measuring time", "calendars",
    "maps and globes", "train travel", "air travel", "bicycle commuting", "packing a suitcase", "visiting Japan",
    "visiting Italy", "visiting Kenya", "visiting Peru", "street food", "spices", "chocolate", "cheese", "honey",
    "olive oil", "fermented foods", "vegetarian cooking", "school lunches", "holiday dinners", "gift ideas",
    "thank-you notes", "wedding speeches", "moving to a new city", "renting an apartment", "buying a used car",
    "changing a tyre", "public libraries", "volunteering", "voting", "how laws are made", "courts", "human rights",
    "the United Nations", "the Olympics", "football tactics", "basketball", "tennis", "cricket", "sailing", "skiing",
    "surfing", "rock climbing", "martial arts", "dance styles", "fashion history", "knitting", "pottery", "origami",
)  # fmt: skip

INSTRUCTIONS = (
    "Explain {topic} to a ten-year-old.",
    "Write a short paragraph about {topic}.",
    "Give me five tips about {topic}.",
    "What are the most common misconceptions about {topic}?",
    "Write a brief introduction to {topic} for a school newsletter.",
    "List three interesting facts about {topic} and explain each in one sentence.",
    "Why does {topic} matter today?",
    "Compare the advantages and disadvantages of {topic}.",
    "Write a friendly email to a colleague about {topic}.",
    "Summarise what a beginner should know about {topic}.",
    "Write a four-line poem about {topic}.",
    "Create a simple step-by-step guide related to {topic}.",
    "Describe the history of {topic} in one paragraph.",
    "Write a dialogue between a teacher and a student about {topic}.",
    "What questions would you ask an expert on {topic}?",
    "Suggest three titles for an article about {topic} and say which one is best.",
    "Write a product description inspired by {topic}.",
    "Explain {topic} with an analogy.",
    "Make a quiz of three questions with answers about {topic}.",
    "Write a short story that begins with a surprise about {topic}.",
    "Can you recommend how to learn more about {topic}?",
    "Write a social media post about {topic} with a positive tone.",
    "What would happen if nobody cared about {topic}?",
    "Outline a ten-minute talk on {topic}.",
    "Write the pros and cons of {topic} as two bulleted lists.",
    "Rewrite the sentence 'I never thought much about {topic}' in three different styles.",
)

_NAMES = ("Ava", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jamal", "Katya", "Leo", "Mina",
          "Noah", "Olga", "Pedro", "Quinn", "Rosa", "Sam", "Tara", "Umar", "Vera", "Wen", "Yusuf", "Zoe")  # fmt: skip
_THINGS = ("apples", "marbles", "stickers", "pencils", "cookies", "books", "seashells", "stamps", "tickets", "bottles",
           "flowers", "cupcakes", "postcards", "buttons", "oranges", "lamps", "chairs", "coins")  # fmt: skip

# Each story is a key of the split. Numbers in the text come from `_numbers`; nobody needs the answer: the target's own
# answer is the training text.
_STORIES = (
    "{a} has {n} {x}. {b} gives {a} {m} more, and then {a} shares all of them equally among {k} friends. How "
    "many {x} does each friend get, and how many are left over?",
    "A shop sells {x} for ${k} each. {a} buys {n} and pays with a ${big} note. How much change does {a} get?",
    "{a} reads {n} pages on Monday, twice as many on Tuesday, and {m} pages on Wednesday. How many pages is "
    "that in all?",
    "A box holds {k} {x}. How many boxes does {a} need for {big} {x}?",
    "{a} walks {k} kilometres every weekday and {m} kilometres on each day of the weekend. How far is that in "
    "{few} weeks?",
    "{a} earns ${n} an hour and works {k} hours a day for {few} days. After spending ${m}, how much money is left?",
    "There are {n} rows of {k} chairs in a hall. {m} chairs are broken. How many people can sit?",
    "{a} is {n} years old. {b} is {k} years younger. In {few} years, what will be the sum of their ages?",
    "A tank contains {big} litres of water. It loses {k} litres an hour. How much is left after {few} hours?",
    "{a} bakes {n} {x} and sells {k} of them in the morning and half of the rest in the afternoon. How many remain?",
    "A train leaves at {few} o'clock and travels {n} kilometres in the first hour and {m} kilometres in each "
    "hour after that. How far has it gone after {k} hours?",
    "{a} and {b} collect {x}. {a} has {n}, which is {k} more than {b}. How many do they have together?",
    "A rectangle is {n} cm long and {k} cm wide. What are its area and its perimeter?",
    "{a} saves ${k} each week. How many weeks does it take to buy a bicycle that costs ${big}, if {a} already "
    "has ${m}?",
    "In a class of {n} pupils, {k} play football, {few} play chess, and {few} of those do both. How many do neither?",
    "A recipe for {few} people needs {k} eggs and {m} grams of flour. How much of each is needed for {n} people?",
    "{a} buys {few} packs of {x} with {n} in each pack. {b} takes {k} of them. How many does {a} still have?",
    "The price of a coat was ${big}. It was reduced by {pct} percent in a sale. What is the new price?",
    "A farmer has {n} hens. Each lays {k} eggs a week. The eggs are sold by the dozen at ${few}. How much "
    "money does the farmer make in a week?",
    "{a} drives {big} kilometres on {n} litres of fuel. How many kilometres is that for each litre, and what "
    "does the trip cost if a litre costs ${few}?",
    "A library had {big} books. It bought {n} new ones and gave away {m}. Then a quarter of the books were "
    "lent out. How many books are on the shelves?",
    "{a} can paint a fence in {k} hours and {b} can paint it in {n} hours. How long do they need together?",
    "The average of {a}'s {few} test scores is {pct}. What score on the next test makes the average {n} points higher?",
    "{a} cuts a rope of {big} cm into {few} equal pieces and then cuts {m} cm from each. How long is each piece now?",
)
_REASONING_ENDINGS = (
    "",
    " Think step by step.",
    " Show your work.",
    " Explain your reasoning.",
    " Solve step by step.",
)

_SCHEMAS: tuple[tuple[str, dict[str, str]], ...] = (
    ("a book", {"title": "string", "author": "string", "year": "number", "genres": "list of strings"}),
    ("a city", {"name": "string", "country": "string", "population": "number", "landmarks": "list of strings"}),
    ("a recipe", {"name": "string", "servings": "number", "ingredients": "list of objects with name and amount"}),
    ("a user account", {"username": "string", "email": "string", "active": "boolean", "roles": "list of strings"}),
    ("a film", {"title": "string", "director": "string", "year": "number", "rating": "number"}),
    ("an animal", {"name": "string", "habitat": "string", "diet": "string", "endangered": "boolean"}),
    (
        "a product",
        {"sku": "string", "name": "string", "price": "number", "in_stock": "boolean", "tags": "list of strings"},
    ),
    ("an invoice", {"number": "string", "date": "string", "items": "list of objects with name, quantity and price"}),
    ("a weather report", {"city": "string", "temperature_c": "number", "conditions": "string", "wind_kmh": "number"}),
    ("a calendar event", {"title": "string", "start": "string", "end": "string", "attendees": "list of strings"}),
    ("a sports team", {"name": "string", "sport": "string", "founded": "number", "players": "list of strings"}),
    ("a planet", {"name": "string", "radius_km": "number", "moons": "number", "has_rings": "boolean"}),
    ("a job posting", {"title": "string", "company": "string", "salary": "number", "skills": "list of strings"}),
    ("a restaurant", {"name": "string", "cuisine": "string", "stars": "number", "menu": "list of strings"}),
    ("a song", {"title": "string", "artist": "string", "length_seconds": "number", "explicit": "boolean"}),
    ("a support ticket", {"id": "number", "subject": "string", "priority": "string", "resolved": "boolean"}),
    ("a course", {"code": "string", "title": "string", "credits": "number", "topics": "list of strings"}),
    ("a flight", {"number": "string", "from": "string", "to": "string", "duration_minutes": "number"}),
    ("a plant", {"name": "string", "sunlight": "string", "water_per_week": "number", "edible": "boolean"}),
    ("a to-do list", {"owner": "string", "tasks": "list of objects with text and done"}),
    ("a configuration file", {"host": "string", "port": "number", "debug": "boolean", "paths": "list of strings"}),
    ("a quiz question", {"question": "string", "choices": "list of strings", "answer": "string"}),
)
_JSON_FORMS = (
    "Return a JSON object that describes {what} about {topic}. Use exactly these fields: {fields}.",
    "Write JSON for {what} related to {topic} with the fields {fields}. Answer with JSON only.",
    "Generate a valid JSON array with two examples of {what} connected with {topic}. Each has the fields {fields}.",
    "Fill in this JSON template for {what} on the subject of {topic}:\n{template}",
    "Create {what} about {topic} and output it as JSON with these keys: {fields}. Do not add any explanation.",
)


@dataclasses.dataclass(frozen=True)
class Templated:
    """One written prompt: its text, and the key by which the split is made."""

    key: str
    text: str


def instruction() -> Iterator[Templated]:
    """Every instruction about every topic."""
    for form, topic in itertools.product(INSTRUCTIONS, TOPICS):
        yield Templated(topic, form.format(topic=topic))


def reasoning(seed: int, per_story: int = 400) -> Iterator[Templated]:
    """Word problems: each story with `per_story` draws of names, things and numbers."""
    for i, story in enumerate(_STORIES):
        rng = random.Random(f"{seed}:{i}")
        for _ in range(per_story):
            a, b = rng.sample(_NAMES, 2)
            text = story.format(a=a, b=b, x=rng.choice(_THINGS), **_numbers(rng))
            yield Templated(story, text + rng.choice(_REASONING_ENDINGS))


def _numbers(rng: random.Random) -> dict[str, int]:
    few = rng.randint(2, 6)
    k = rng.randint(few + 1, 12)
    n = rng.randint(k + 2, 60)
    return {
        "few": few, "k": k, "n": n, "m": rng.randint(2, 40), "big": rng.randint(n + 60, n + 400),
        "pct": rng.choice((10, 15, 20, 25, 30, 40, 50, 60, 70)),
    }  # fmt: skip


def json_output() -> Iterator[Templated]:
    """Requests for JSON: every schema in every form about every topic."""
    for form, (what, schema), topic in itertools.product(_JSON_FORMS, _SCHEMAS, TOPICS):
        fields = ", ".join(f'"{name}" ({kind})' for name, kind in schema.items())
        template = json.dumps(dict.fromkeys(schema, "..."), indent=2)
        yield Templated(topic, form.format(what=what, topic=topic, fields=fields, template=template))
