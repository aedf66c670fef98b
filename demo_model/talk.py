# SPDX-License-Identifier: Apache-2.0
"""Small talk and the polite "I do not know"; each intent has training and held-out phrasings and its replies.

Same pattern language as `phrases`; the first reply of an intent is the usual one.
"""

from __future__ import annotations

from dataclasses import dataclass

from demo_model.phrases import expand_all

ABILITIES = (
    "I know simple facts, I add and subtract, I put a sentence into JSON, "
    "and I call tools for the weather and the time."
)  # fmt: skip
UNKNOWN_REPLY = "I do not know that; I am a toy model."
UNKNOWN_THOUGHT = "This is not in my world."


@dataclass(frozen=True)
class Intent:
    """Small talk of one intent: phrasings of a user and the replies that fit them."""

    name: str
    said: tuple[str, ...]
    held: tuple[str, ...]
    replies: tuple[str, ...]

    @property
    def thought(self) -> str:
        return f"This is small talk: {self.name}."


def intent(name: str, said: tuple[str, ...], held: tuple[str, ...], *replies: str) -> Intent:
    """An intent with its patterns expanded."""
    return Intent(name, tuple(expand_all(said)), tuple(expand_all(held)), replies)


INTENTS = (
    intent(
        "greeting",
        ("[Hi|Hello|Hey|Good morning|Good afternoon][| there|, friend| you| bot]",
         "[Good evening|Greetings|Hello hello|Hi hi][| there|, friend| you| bot]",
         "[Hi|Hello|Hey|Good morning|Good afternoon][ quire|, quire-demo| again| everyone|, assistant]",
         "[Good evening|Greetings|Hello hello|Hi hi][ quire|, quire-demo| again| everyone|, assistant]",
         "Hey hey", "Howdy", "Hiya",
         "Nice to meet you", "[Hi|Hello|Hey], [I am|I'm] [Anna|Tom|Ben|Maria|new here]", "Good day", "Yo",
         "Hello world"),
        ("Hello my friend", "Oh hello", "Hi, assistant bot", "Good morning, my friend", "Hello, I am Sam",
         "Good evening to you",
         "It is nice to meet you", "Hello bot, good day"),
        "Hello! How can I help you?"),
    intent(
        "identity",
        ("[Who|What] are you", "Who is this", "[What is|What's|Tell me] your name", "Do you have a name",
         "[Tell me|Say something] about yourself", "Introduce yourself", "[Which|What] model are you",
         "Are you [a bot|human|an AI|a robot]",
         "Are you a [real person|language model|person|machine|computer]", "What are you called",
         "What should I call you",
         "Who am I [talking|speaking|chatting] [to|with]", "Who made you",
         "What kind of [model|bot|AI] are you", "Your name",
         "Are you ChatGPT", "What is quire-demo", "How are you called", "Please introduce yourself",
         "Say your name", "[Say|I want to know] who you are", "Tell me what you are[| called]",
         "What is the name of this [model|program]", "What [bot|program|AI] is this",
         "[Could you|Can you] say your name"),
        ("Can you tell me your name", "Tell me who you are", "What model is this",
         "What's the name of this bot",
         "Are you a human or a bot", "Could you introduce yourself", "Who is speaking", "What AI are you"),
        "I am quire-demo, a toy model that ships with quire."),
    intent(
        "thanks",
        ("[Thanks|Thank you|Many thanks|Thanks a lot][|, friend| for your help| for that]",
         "[Thanks|Thank you|Many thanks|Thanks a lot][ for the answer|, bot|, that helps]",
         "[Thank you very much|Thank you so much|Thx|Cheers][|, friend| for your help| for that]",
         "[Thank you very much|Thank you so much|Thx|Cheers][ for the answer|, bot|, that helps]",
         "[Great|Good|Nice|Perfect|Ok], [thanks|thank you]",
         "That was [helpful|nice|great]", "You are [great|helpful|kind|nice]",
         "[Good|Nice|Great] [job|work|answer]", "Well done", "I thank you",
         "Thank you for [everything|the help|all of it|your time|this]", "Thanks for [the help|all|everything]",
         "[That|This] [is|was] [great|good|nice|perfect], [thanks|thank you]",
         "[Well done|Good job|Great job], [thanks|thank you]", "You did [well|a great job|very well]"),
        ("Thanks a lot for the help", "Thank you, this helps", "Thank you, you did a good job",
         "Many thanks, you are great",
         "This is well done, thanks", "Thank you for all your help", "Thank you for the great work",
         "That is helpful, thanks"),
        "You are welcome!"),
    intent(
        "goodbye",
        ("[Bye|Goodbye|Bye bye|See you|See you later][|, friend|, bot|, quire]",
         "[Bye|Goodbye|Bye bye|See you|See you later][, and thanks| then| for now]",
         "[See you soon|Good night|Farewell|Take care][|, friend|, bot|, quire]",
         "[See you soon|Good night|Farewell|Take care][, and thanks| then| for now]", "I have to go[| now]",
         "[I am|I'm] leaving[| now]", "Until [next time|tomorrow|later]",
         "That is all[| for today| for now]", "Ciao", "[I must|I need to] [go|leave]", "Talk to you later",
         "Have a nice [day|evening]"),
        ("Bye, I am leaving now", "Bye, see you tomorrow", "I must go now, goodbye",
         "Goodbye and take care", "See you next time",
         "Good night, see you", "I am going now, bye", "That is all, goodbye"),
        "Goodbye! Have a nice day."),
    intent(
        "wellbeing",
        ("[How are you|How are you doing|How do you feel][| today| now|, friend|, bot]",
         "[How's it going|How is it going][| today| now|, friend|, bot]",
         "[How are things|Are you ok|Are you well|How do you do][| today| now|, friend|, bot]",
         "How [is|was] your day", "What's up", "Are you [happy|fine|good|feeling well]",
         "[I am|I'm] [fine|good|well], [and you|how are you]", "How have you been",
         "[Hi|Hello|Hey][,|!] how are you[| today| doing]",
         "How are you [tonight|this evening|this afternoon|right now]", "Do you feel [good|well|fine|ok][| now]",
         "Is everything [ok|fine|alright|good]", "How is [everything|life|your morning]",
         "Are you feeling [good|fine|ok]"),
        ("How is it going with you", "How are you feeling", "How are things going today",
         "Are you doing well", "How are you this morning",
         "Do you feel good today", "Is everything fine with you", "How has your day been"),
        "I am fine, thank you. How can I help you?"),
    intent(
        "abilities",
        ("What can you do[| for me]",
         "[What do you know|What do you do|How can you help me|Can you help me]",
         "[Help|Help me|I need help]",
         "What are you [good at|able to do|for|made for]", "[Tell me|Show me|List] what you can do",
         "What [can|could|should] I ask[| you]",
         "What are your [abilities|skills|features]", "How do I use you",
         "What [kind of questions|questions] can you answer",
         "What are you capable of", "What do you [know about|understand]",
         "What [sort|kind|kinds] of [questions|tasks|work] can you do", "What things can you do",
         "[Could|Can] you say what you can do", "What are you able to [know|say]",
         "Which questions can [I ask|you answer]", "What can you help with"),
        ("What can you help me with", "Can you tell me what you can do", "Which things can you do",
         "What kind of things do you know",
         "How could you help me", "What are you able to answer", "Tell me your abilities",
         "Show me your skills"),
        ABILITIES),
    intent(
        "joke",
        ("[Tell|Tell me|Give me] [a joke|a good joke|a funny joke|another joke|one more joke]",
         "[Do you know|Say] [a joke|a good joke|a funny joke|another joke|one more joke]",
         "[I want|I need|Make] [a joke|a good joke|a funny joke|another joke|one more joke]",
         "[Let me hear|I'd like] [a joke|a good joke|a funny joke|another joke|one more joke]",
         "[Can|Could] you [tell|make] [a joke|me a joke|jokes]", "Make me laugh",
         "[Joke|A joke|Jokes|Another joke]", "Say something funny",
         "Tell me something funny", "Do you know [jokes|any jokes]", "Be funny", "Know any jokes",
         "[Could you|Please|Try to] make me laugh", "Can you make me smile", "[Have you|Do you have] a joke",
         "[Can|Could] you be funny", "Could you say something funny", "I want to laugh"),
        ("I would like to hear a joke", "Could you tell me a funny joke", "Do you have a joke for me",
         "A good joke, please",
         "Can you make me laugh", "Tell me one more funny joke", "Can you say something funny",
         "Have you got a joke"),
        "Why did the token cross the cache? To get to the other page.",
        "What is a byte's favourite snack? A small bit.",
        "Why was the tensor tired? It had too many dimensions."),
)  # fmt: skip

# Out of the world: {t} is a topic, {n} a proper name, {k} a country.
TOPICS = ("love", "music", "football", "history", "the economy", "time travel", "dinosaurs", "computers",
"painting",
          "cooking", "politics", "philosophy", "the ocean", "black holes", "chess", "cars", "tennis",
          "the stock market",
          "the internet", "biology", "shoes", "volcanoes", "poetry", "trains", "religion", "space",
          "cheese", "bread",
          "electricity", "the moon", "gravity", "airplanes", "basketball", "movies", "books",
          "dreams")  # fmt: skip
HELD_TOPICS = ("geology", "robots", "pottery", "opera", "sailing", "medicine", "bridges", "coffee")
UNKNOWN = expand_all((
    "[Who|When|Why] [invented|discovered|started|made] {t}?",
    "[Explain|Describe|Summarize|Tell me about|Teach me] {t}",
    "What do you think about {t}?", "Write a [poem|story|song|text|letter|book|program] about {t}",
    "How does {t} work?",
    "What is the [meaning|history|future|best book|price|origin|point] of {t}?", "Why is {t} so important?",
    "Who is [the president|the king|the prime minister|the queen|the leader] of {k}?",
    "What is the [population|area|flag|anthem|highest mountain|longest river] of {k}?",
    "How many people live in {k}?", "How [big|old|far|large|rich] is {k}?", "Who [is|was] {n}?",
    "When was {n} born?", "Who wrote {n}?",
    "What is the best [movie|song|book|restaurant|team|hotel] in {k}?", "How far is it from {k} to {n}?",
    "What happened in [1|2|][9|8|7]{d}{d}?",
    "Who won the [world cup|match|election|race|war] in [19|20]{d}{d}?", "What time is it?",
    "What day is it today?",
    "Is {t} [good|bad|real|dangerous|hard]?", "Translate [hello|this|the word|love] into {n}",
    "How do I [cook|learn|build|repair|buy|fix] {t}?",
    "What is the speed of [light|sound|a car|a train]?", "How tall is {n}?", "Where is {n}?",
    "Give me [advice|news|facts|a recipe|an essay] about {t}",
    "What is the square root of {d}{d}?", "What is {d}{d} [times|divided by|*|/] {d}{d}?",
    "Do you like {t}?", "What is {t}?",
    "Can you [write|draw|sing|play|code] {t}?", "Which {t} is the best?", "What is the meaning of life?",
    "How old are you?", "Where do you live?",
    "When did {n} [die|begin|end|happen]?", "What does {n} mean?", "How much does {t} cost?",
    "Should I [learn|buy|like|try] {t}?",
    "What is the capital of {n}?", "Which continent is {n} in?", "Where can I [find|buy|see] {t}?",
    "What are the rules of {t}?", "{t}?",
))  # fmt: skip
HELD_UNKNOWN = expand_all((
    "Who was the first [president|king] of {k}?", "Can you explain {t}?", "Tell me the history of {t}",
    "Could you write me a story about {t}",
    "How old is {n}?", "What is the biggest river of {k}?", "Why do people like {t}?",
    "Who was the winner in 19{d}{d}?",
    "When did {t} begin?", "What do you know about {n}?", "How can I learn {t}?",
    "How many people are there in {k}?",
))  # fmt: skip
