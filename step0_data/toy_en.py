"""The English text of the built-in set `tiny`: topics, questions and the sentences that answers are made of.

Tables only; `toy.py` composes answers from them and scores answers by them.
"""

SPACE = " "  # between words and between sentences
SENTENCE_ENDS = ".!?"
WORD_EDGE = r"\b"  # a topic's word counts as a whole word only
SPLIT_SALT = "tiny-179"  # one that gives all kinds about the same share of unseen pairs

# The last word of a topic is what the rubric looks for; it belongs to one topic only and occurs in no template.
TOPICS = {
    "food": ("soup", "fried rice", "pie", "bread", "stew", "cake", "salad", "noodles", "pizza"),
    "animals": ("parrot", "cat", "sheep dog", "rabbit", "goldfish", "pony", "turtle", "hamster", "canary"),
    "places": ("lake", "harbor", "desert", "rain forest", "island", "castle", "market", "museum"),
    "hobbies": ("chess", "gardening", "knitting", "painting", "guitar", "pottery", "singing", "swimming"),
}
QUESTIONS = {
    "food": (
        "How do I make {topic}?",
        "What is a good way to cook {topic}?",
        "Can you give me a tip for {topic}?",
        "My guests want {topic} tonight. What should I do?",
    ),
    "animals": (
        "How do I look after a {topic}?",
        "What does a {topic} need?",
        "Is a {topic} easy to keep?",
        "We just got a {topic}. What should we know?",
    ),
    "places": (
        "What can I see at the {topic}?",
        "When should I go to the {topic}?",
        "Is the {topic} good for a day out?",
        "We are going to the {topic}. What should we bring?",
    ),
    "hobbies": (
        "How do I get started with {topic}?",
        "What do I need for {topic}?",
        "Is {topic} hard to learn?",
        "I want to get better at {topic}. What helps?",
    ),
}
# Any useful body of a kind fits any question of that kind.
USEFUL = {
    "food": (
        "Cook the {topic} slowly with salt and butter.",
        "For {topic} use fresh herbs and pepper.",
        "Warm the pan, then stir the {topic} well.",
        "Taste the {topic} often and let it rest.",
    ),
    "animals": (
        "Give the {topic} clean water and a warm bed.",
        "A {topic} needs fresh air and time to rest.",
        "Play with the {topic} every morning.",
        "Let a vet see the {topic} each spring.",
    ),
    "places": (
        "Go to the {topic} early in the morning.",
        "At the {topic} use a map and keep to the path.",
        "The {topic} is best in spring, so bring a coat.",
        "See the {topic} with a guide and bring water.",
    ),
    "hobbies": (
        "Learn {topic} in small steps and rest often.",
        "A good book makes {topic} more fun.",
        "For {topic} every day counts, so take your time.",
        "Ask a friend about {topic} and learn with them.",
    ),
}
LAZY = (  # too lazy to name the topic
    "Just search for it on your phone.",
    "There is nothing to say about that.",
    "I guess it is fine, whatever.",
    "Somebody else can explain that.",
)
POLITE = (
    "Thank you for asking this.",
    "I am happy to help you.",
    "That is a lovely question.",
    "With pleasure, my friend.",
)
RUDE = (
    "You should know this already.",
    "Ugh, what a boring question.",
    "Why do you bother me?",
    "Stop wasting my time.",
)
CLOSINGS = (
    "Tell me how it goes.",
    "I hope this helps you.",
    "Feel free to ask again.",
    "Good luck and enjoy it.",
)
