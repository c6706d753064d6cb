"""The prompts that the teacher answers for distillation: every topic in every form.

The held-out topics share no subject with the training topics, so that what is measured on them is how
the draft does on questions that it has not seen answered.
"""

from __future__ import annotations

TOPICS = (
    *("the water cycle", "photosynthesis", "plate tectonics", "black holes", "the immune system"),
    *("evolution", "electric motors", "vaccines", "the periodic table", "sound waves", "magnets"),
    *("the solar system", "volcanoes", "coral reefs", "bees", "whales", "penguins", "mushrooms"),
    *("the Roman Empire", "the Silk Road", "the Renaissance", "the printing press", "railways"),
    *("ancient Egypt", "the Vikings", "the Olympic Games", "the moon landing", "the telephone"),
    *("Japan", "Brazil", "Kenya", "Italy", "Canada", "New Zealand", "Norway", "India", "Mexico"),
    *("Paris", "Istanbul", "New York", "Sydney", "Cairo", "Amsterdam", "the Alps", "the Sahara"),
    *("Python lists", "sorting algorithms", "recursion", "databases", "operating systems"),
    *("computer networks", "encryption", "version control", "unit tests", "web browsers"),
    *("machine learning", "neural networks", "search engines", "spreadsheets", "robots"),
    *("fractions", "prime numbers", "probability", "triangles", "percentages", "algebra"),
    *("bread", "coffee", "tea", "chocolate", "pasta", "rice", "soup", "salads", "olive oil"),
    *("running", "swimming", "yoga", "chess", "football", "cycling", "hiking", "gardening"),
    *("the piano", "jazz", "painting", "photography", "poetry", "theatre", "novels", "film"),
    *("saving money", "taxes", "inflation", "insurance", "starting a business", "marketing"),
    *("job interviews", "teamwork", "time management", "public speaking", "remote work"),
    *("sleep", "stress", "healthy food", "first aid", "posture", "hand washing", "vitamins"),
    *("friendship", "honesty", "curiosity", "patience", "learning a language", "good habits"),
    *("bridges", "skyscrapers", "solar panels", "wind turbines", "batteries", "bicycles"),
    *("recycling", "climate change", "rain forests", "rivers", "deserts", "public transport"),
    *("dogs", "cats", "horses", "houseplants", "trees", "butterflies", "sharks", "dinosaurs"),
)

HELD_OUT_TOPICS = (
    *("lighthouses", "tomatoes", "the violin", "glaciers", "compilers", "board games"),
    *("elections", "elephants", "paper", "tides", "Portugal", "meditation", "airplanes"),
    *("cheese", "statistics", "museums"),
)

FORMS = (
    "Tell me about {}.",
    "Explain {} to a ten-year-old.",
    "What should everyone know about {}?",
    "Write a short story about {}.",
    "Give me five tips about {}.",
    "Why does {} matter?",
    "Write a paragraph about {} for a school newspaper.",
    "List three common mistakes people make about {}.",
    "What is the history of {}?",
    "Describe {} in two sentences.",
    "I know nothing about {}. Where do I begin?",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a friend about {}.",
    "How has {} changed over the last hundred years?",
    "Make up a quiz question about {} and answer it.",
    "Compare {} with something similar.",
    "Summarise the most important facts about {} in bullet points.",
    "Write a dialogue between two people who discuss {}.",
    "What will {} be like in fifty years?",
)


def prompts(held_out: bool) -> list[str]:
    """All questions about the training topics or about the held-out ones."""
    topics = HELD_OUT_TOPICS if held_out else TOPICS
    return [form.format(topic) for form in FORMS for topic in topics]
