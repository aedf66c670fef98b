# SPDX-License-Identifier: Apache-2.0
"""Phrasings of all that is neither a fact nor for a tool; `HELD_*` lists never occur in training.

A pattern like "[hi|hello][ there|]" stands for every choice of its bracketed alternatives.
"""

from __future__ import annotations

import itertools
import re


def expand(pattern: str) -> list[str]:
    """All the strings a pattern stands for, in a fixed order."""
    parts = [part.split("|") for part in re.split(r"[\[\]]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def expand_all(patterns: tuple[str, ...]) -> list[str]:
    """The distinct strings of several patterns."""
    return list(dict.fromkeys(itertools.chain.from_iterable(map(expand, patterns))))


# Frames take a noun phrase {np} ("the capital of France").
FRAMES = expand_all((
    "[What is|What's|What was|Tell me|Name|Give me|Say|State] {np}",
    "[Do you know|Can you tell me|Could you tell me|Can you name|Can you give me|Could you name] {np}?",
    "[I want to know|I would like to know|I'd like to know|I need] {np}.",
    "[I need to know|Let me know|Please tell me] {np}.",
    "[Do you know|Can you tell me|Can you say|I want to know|Tell me|Please tell me|Explain] what {np} is",
    "[Question|My question|Quick question|Quiz]: [what is |]{np}?",
    "{np}?", "{np} is?", "{np} is what?", "[And|So|Now|Ok,|Well,] what is {np}?", "What would {np} be?",
))  # fmt: skip
HELD_FRAMES = expand_all((
    "[Could you please tell me|Would you tell me|Can you let me know] {np}?",
    "[I need to know|I would like to know|Could you tell me|Let me know] what {np} is",
    "Would you please [name|say|state] {np}?", "I am asking for {np}.",
    "Do you know the answer: what is {np}?",
))  # fmt: skip

PREFIXES = tuple(expand_all((
    "Please[,|] ", "[Hey|Hi|Hello|Hey there|Hello there|Good morning|Good evening|Good day][,|!] ",
    "[Ok|Okay|So|Well|Hmm|Right|Alright|Also|Sorry][,|] ", "[Now|And|Then] ",
    "[Good|Thanks|Thank you|Great|Nice|Cool|Perfect|Very good|That is great|Thanks a lot][.|!] ",
    "[Thanks|Thank you|Great|Nice], [that helps|very nice|well done]. ",
    "[Quick question|A question|A quick question|Another question|My question|The next question]: ",
    "[Next|One more|The next one|An easy one|Last question|My last one]: ",
    "[Tell me|Let me ask|Let me ask you|May I ask|Can I ask|I want to ask][:|,] ",
    "[I wonder|I was wondering|I am curious|I have a question]: ",
)))  # fmt: skip
SUFFIXES = tuple(expand_all((
    "[ |, ][please|thanks|thank you|thank you so much|thanks a lot|many thanks|if you can|if you know]",
    "[ |, ][now|quickly|if you know it|right away]",
    "[ |. |? |! ][Please|Thanks|Thank you|Thank you so much|Thanks a lot|Many thanks|Thanks in advance][.|!]",
    "[ |. |? |! ][Tell me|I need it|I am curious|I would like to know|I have to know|Do you know it].",
    "[, | ]please[, | and ][thanks|thanks a lot|thank you so much]",
    "[, | ][do you know|can you say|can you help|could you say|could you help me|any idea|ok|right]?",
    "!", "??", " ?", "...",
)))  # fmt: skip
HELD_PREFIXES = (
    "One more question: ", "Thanks, that is good. ", "Hello again, ", "Here is my question: ", "Hi there, ",
    "My next one is: ", "Good afternoon, ", "My turn to ask: ",
)  # fmt: skip
HELD_SUFFIXES = (
    " Thank you very much.", " please, and thank you", " I want to know.", ", can you tell me?",
    " Thank you for your help.", ", would you tell me?",
)  # fmt: skip

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant", "You are helpful.",
                  "You are a friendly assistant.", "Be helpful and short.",
                  "You are a helpful, honest assistant.",
                  "You are quire-demo.", "Answer briefly.", "You are an AI assistant.",
                  "Answer the user's questions.",
                  "You are a helpful AI assistant. Answer in one sentence.", "Be kind.",
                  "You are a chat bot.",
                  "You are a concise assistant.", "Help the user.",
                  "You are a polite assistant.")  # fmt: skip
HELD_SYSTEM_PROMPTS = (
    "You are a kind and helpful assistant.",
    "You are a helpful bot.",
    "Be a helpful assistant.",
)

ADD = expand_all((
    "[What is|What's|Calculate|Compute|Tell me|Work out|How much is|Solve|] {a}[ + |+| plus ]{b}",
    "[Add|Please add|Can you add|Sum] {a} and {b}",
    "{a}[ + |+| plus ]{b}[ =| = ?| is?|=| equals?| makes?| gives?]",
    "[What is|What's|Tell me|Give me|Compute|Calculate] the sum of {a} and {b}",
    "Can you [calculate|do] {a} + {b}?",
    "[What do you get|What is the result] if you add {a} and {b}?", "What does {a} plus {b} [make|give]?",
    "Do you know [how much is|what is] {a}[ + | plus ]{b}?", "The sum of {a} and {b}?",
    "How much is {a} and {b}?",
    "What do {a} and {b} [make|add up to]?", "Can you tell me {a}[ + | plus ]{b}?", "Increase {a} by {b}",
    "How much [are|do you get from|do you have with] {a} and {b}[| together| in total]?",
    "How much does {a} and {b} [give|come to]?", "[What is|What are] {a} and {b} [together|in total]?",
    "[Find|I want|Give me|I need] {a}[ + | plus ]{b}", "[Find|I want|Work out] the sum of {a} and {b}",
    "[Could you|Would you|Please] add {a} [to|and] {b}?", "What is the total of {a} and {b}?",
    "[Could you|Would you] tell me {a}[ + | plus ]{b}?", "Give me the result of {a} + {b}",
))  # fmt: skip
SUB = expand_all((
    "[What is|What's|Calculate|Compute|Tell me|Work out|How much is|Solve|] {a}[ - |-| minus ]{b}",
    "[Subtract|Please subtract|Can you subtract|Take] {b} from {a}",
    "{a}[ - |-| minus ]{b}[ =| = ?| is?|=| equals?]",
    "[What is|Tell me|Give me|Compute|Calculate] the difference of {a} and {b}",
    "Can you [calculate|do] {a} - {b}?",
    "[What do you get|What is the result] if you subtract {b} from {a}?",
    "What does {a} minus {b} [make|give]?",
    "Do you know [how much is|what is] {a}[ - | minus ]{b}?", "What is {a} take away {b}?", "{a} less {b}?",
    "What is left of {a} without {b}?", "Can you tell me {a}[ - | minus ]{b}?", "Decrease {a} by {b}",
    "[How much is|Compute|Calculate|Tell me|Work out] {b} [subtracted|taken|deducted|taken away] from {a}",
    "[What is|What's] {b} [taken|deducted|taken away|removed] from {a}?",
    "{b} [subtracted|taken] from {a}[| is?| equals?| =]",
    "What [is left|remains] if {b} is [taken|subtracted|removed] from {a}?",
    "If I [take|subtract] {b} from {a}, what [is left|do I get|remains]?",
    "[Find|I want|Give me|I need] {a}[ - | minus ]{b}", "[Find|I want|Work out] the difference of {a} and {b}",
    "[Could you|Would you] tell me {a}[ - | minus ]{b}?", "[Could you|Would you] take {b} from {a}?",
    "Give me the result of {a} - {b}", "What is the result of taking {b} from {a}?",
))  # fmt: skip
HELD_ADD = expand_all((
    "Could you [compute|work out] {a} + {b}?", "Would you [calculate|compute] {a}[ + | plus ]{b}?",
    "What number is {a} plus {b}?", "I need the sum of {a} and {b}.", "How much do {a} and {b} make?",
    "Please tell me what {a} plus {b} is.",
    "What is the result of {a} + {b}?", "Can you tell me the sum of {a} and {b}?",
))  # fmt: skip
HELD_SUB = expand_all((
    "Could you [compute|work out] {a} - {b}?", "Would you [calculate|compute] {a}[ - | minus ]{b}?",
    "I need the difference of {a} and {b}.", "What is the result of {a} - {b}?",
    "What is {b} subtracted from {a}?", "From {a} subtract {b}.",
    "Please tell me what {a} minus {b} is.", "Could you subtract {b} from {a}?",
))  # fmt: skip

EXTRACT = expand_all((
    "[Extract|Get|Find] {f} [from this sentence|from the sentence] as JSON: {s}",
    "[Extract|Get|Find] {f} [from this text|from this] as JSON: {s}",
    "[Read|Take] {f} [from this sentence|from the sentence|from this text|from this] as JSON: {s}",
    "[Extract|Give me|Return|Write] {f} as JSON: {s}", "[Extract|Return|Give] JSON with {f}: {s}",
    "{s} [Extract|Give me|Return|Write|Get] {f} as [JSON|a JSON object].", "{s} Put {f} into JSON.",
    "Turn this [sentence |text |]into JSON with [the keys |the fields |]{f}: {s}", "JSON with {f}: {s}",
    "What are {f} [in this sentence|here|in this text]? Answer [in|as] JSON. {s}", "As JSON, {f}: {s}",
    "Make a JSON object with {f} from this [sentence|text]: {s}", "Read this: {s} Answer with {f} in JSON.",
    "{s} [Make|Build|Create|Give me|Return|Give|I want] [a JSON object|JSON] with [the fields |the keys |]{f}.",
    "{s} [Turn|Put|Make] {f} into [JSON|a JSON object].",
    "[Please read|Read] [the|this] [sentence|text] and [give me|write|extract|find] {f} as JSON: {s}",
    "[Return|Write|Build|Create] a JSON object with [|the fields |the keys ]{f} [from|out of] the text: {s}",
    "Give me a JSON object with [|the keys ]{f} [from|out of|for] this [text|message]: {s}",
    "[Please |Can you |Could you |]extract {f} from this message [and answer as|into|as] JSON: {s}",
    "[Please |]turn this [message|text] into JSON with [the keys |]{f}: {s}",
))  # fmt: skip
HELD_EXTRACT = expand_all((
    "Please extract {f} from this text and answer in JSON: {s}", "Find {f} in this sentence, as JSON: {s}",
    "{s} Write a JSON object with {f}.", "Give me a JSON object with the fields {f} for this sentence: {s}",
    "{s} Now answer with JSON holding {f}.", "From this message take {f} and write JSON: {s}",
    "Please turn this into a JSON object with {f}: {s}", "Read the sentence and return {f} as JSON: {s}",
))  # fmt: skip

REPEAT = ("Repeat: {words}", "Repeat after me: {words}", "Echo: {words}", "Copy this: {words}")

# Schema: keys, training sentences, held-out sentences.
PERSON = ("name", "age", "city"), expand_all((
    "{name} is {age}[ years old|] and [lives in|comes from|is from] {city}.",
    "{name}, {age}, lives in {city}.",
    "[My friend|My neighbour|My brother|My sister|] {name} lives in {city} and is {age}[ years old|].",
    "I am {name}, I am {age}[ years old|] and I live in {city}.", "{name} from {city} is {age}[ years old|].",
    "My name is {name}, I live in {city} and I am {age}.",
    "In {city} lives {name}, who is {age}[ years old|].",
    "{age} years old, {name} lives in {city}.", "{name} moved to {city} at the age of {age}.",
    "I met {name} in {city}; [she|he] is {age}.", "At {age}, {name} [lives|works] in {city}.",
    "{name}, who [comes|is] from {city}, is {age}[ years old|].", "{name} works in {city} and is {age}.",
    "Hello, I am {name} from {city}, {age} years old.", "{name} still lives in {city} and is {age}.",
)), expand_all((
    "My friend {name} is {age} and lives in {city}.", "{name} now lives in {city} and is {age}.",
    "{name} is from {city} and is {age}.",
    "Hi, I am {name} from {city} and I am {age} years old.",
    "{name}, who lives in {city}, is {age} years old.",
))  # fmt: skip
ORDER = ("item", "quantity", "price"), expand_all((
    "[I|We|She|He] bought {quantity} {item} for {price}[ euros| dollars|].",
    "{quantity} {item} cost {price}[ euros| dollars|].",
    "[Anna|Tom] [ordered|paid for] {quantity} {item}, the price is {price}[ euros| dollars|].",
    "[Anna|Tom] took {quantity} {item}, the price is {price}[ euros| dollars|].",
    "My mother [ordered|paid for] {quantity} {item}, the price is {price}[ euros| dollars].",
    "The customer [ordered|paid for] {quantity} {item}, the price is {price}[ euros| dollars].",
    "[My mother|The customer] [ordered|paid for] {quantity} {item}, the price is {price}.",
    "[My mother|The customer] took {quantity} {item}, the price is {price}[ euros| dollars|].",
    "I paid {price}[ euros| dollars|] for {quantity} {item}.",
    "For {price}[ euros| dollars|] you get {quantity} {item}.",
    "The price of {quantity} {item} is {price}[ euros| dollars|].",
    "Order: {quantity} {item}, {price}[ euros| dollars].",
    "We sold {quantity} {item} at {price}[ euros| dollars|].",
    "[I need|I want|Send me] {quantity} {item} for {price}[ euros| dollars|].",
    "[He|We|Tom] paid {price}[ euros| dollars|] for {quantity} {item}.",
    "[Anna|He|We] ordered {quantity} {item} for {price}[ euros| dollars|].",
)), expand_all((
    "Tom bought {quantity} {item} and paid {price} euros.",
    "They ordered {quantity} {item} for {price} dollars.",
    "She paid {price} euros for {quantity} {item}.", "{quantity} {item} for {price} euros, please.",
))  # fmt: skip
EVENT = ("person", "date", "event"), expand_all((
    "{person} has a {event} on {date}.", "On {date}, {person} has a {event}.",
    "The {event} of {person} is on {date}.",
    "{person} [goes to|is going to|will be at|comes to|plans] a {event} on {date}.",
    "{date} is the {event} of {person}.",
    "There is a {event} with {person} on {date}.", "{person}'s {event} is on {date}.",
    "{person} [had|missed] a {event} on {date}.",
    "[I meet|I will see|We saw] {person} at the {event} on {date}.", "{date}: {event} with {person}.",
    "On {date} {person} [goes to|has|plans] a {event}.", "On {date} there [will be|was] a {event} for {person}.",
    "The {event} for {person} [will be|was] on {date}.", "{person} was at a {event} on {date}.",
)), expand_all((
    "On {date} there is a {event} with {person}.", "{person} is at a {event} on {date}.",
    "{person} will have a {event} on {date}.", "The {event} with {person} is on {date}.",
))  # fmt: skip
SCHEMAS = (PERSON, ORDER, EVENT)
