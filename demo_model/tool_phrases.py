# SPDX-License-Identifier: Apache-2.0
"""Phrasings of questions for the tools and of their results; `HELD_*` lists never occur in training.

Same pattern language as `phrases`.
"""

from __future__ import annotations

from demo_model.phrases import expand_all

WEATHER = expand_all((
    "[What is|What's|How is|How's|Tell me] the weather [in|for] {city}[ today| now| right now|]",
    "[Check|Get|Show me|Look up] the weather [in|for] {city}[ today| now| right now|]",
    "[What is|What's] the weather like in {city}[ today| now| right now|]",
    "[Is it|Will it be] [cold|warm|hot|sunny|raining|windy|snowing|nice|cloudy] in {city}[ today| now|]?",
    "[Can you|Could you|Please] [check|tell me|get|look up] the weather [in|for] {city}[ today|]",
    "[What is|What's|Tell me] the temperature in {city}[ today| now|]", "Weather in {city}[ today| now|]?",
    "{city} weather[ today|]?",
    "How [warm|cold|hot] is it in {city}[ today| now|]?",
    "[Do I need|Should I take] an umbrella in {city}[ today|]?",
    "What weather [is it|do they have] in {city}?", "Does it [rain|snow] in {city}[ today| now|]?",
    "Weather for {city}, please.",
    "[I want|I would like|I'd like|I need] to know the weather in {city}",
    "How many degrees is it in {city}?",
    "[I am going|I travel] to {city}[ today| tomorrow|], [what is|how is] the weather there?",
    "I fly to {city}[ today| tomorrow|], [what is|how is] the weather there?", "And in {city}?",
    "[How is|What is|How's] the weather in {city} [this morning|this evening|tonight|currently|outside]?",
    "[Would|Will] you [look at|find out|get|tell me] the weather [for|in] {city}?",
    "[Do you have|Have you got] the weather [for|in] {city}?", "I am in {city}, what is the weather?",
    "[Could|Can] you find the weather [in|for] {city}?", "What's the [current|latest] weather in {city}?",
))  # fmt: skip
HELD_WEATHER = expand_all((
    "Could you show me the weather in {city}?", "How is the weather in {city} at the moment?",
    "I am in {city}. How is the weather?",
    "Do you know the weather in {city}?", "What temperature is it in {city}?",
    "Is the weather nice in {city}?",
    "Let me know the weather in {city}.", "Is it raining or sunny in {city}?",
    "Would you check the weather for {city}?",
    "What's today's weather in {city}?", "Tell me how the weather is in {city}.",
))  # fmt: skip
CONDITIONS = ("sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "stormy", "clear", "humid", "dry",
"misty", "icy",
              "partly cloudy", "hazy")  # fmt: skip
# Tool results: {t} degrees, {w} condition, {c} city.
RESULTS = expand_all((
    '{"[temperature|temp|temp_c|degrees|celsius]": {t}, "[condition|conditions|weather]": "{w}"}',
    '{"[temperature|temp|temp_c|degrees|celsius]": {t}, "[sky|description]": "{w}"}',
    '{"[condition|conditions|weather|summary]": "{w}", "[temperature|temp|temp_c|degrees]": {t}}',
    '{"[city|location]": "{c}", "[temperature|temp|temp_c]": {t}, "[condition|conditions|weather]": "{w}"}',
    '{"place": "{c}", "[temperature|temp|temp_c]": {t}, "[condition|conditions|weather]": "{w}"}',
    '{"city": "{c}", "temperature": {t}, "unit": "[celsius|C]", "[condition|conditions|weather]": "{w}"}',
    "{t}[ degrees| C|C|°C], {w}", "{w}, {t}[ degrees| C|C|°C]", "{c}: {t}[ degrees|°C|C] and {w}",
    "It is {w}, {t}[ degrees|°C].",
    '{"city": "{c}", "[condition|weather]": "{w}", "[temperature|temp]": {t}, "humidity": {h}}',
    '{"[temperature|temp]": {t}, "[wind|humidity]": {h}, "[condition|conditions]": "{w}"}',
))  # fmt: skip
HELD_RESULTS = expand_all((
    '{"city": "{c}", "conditions": "{w}", "temp_c": {t}}', '{"sky": "{w}", "temperature": {t}}',
    "{t} degrees and {w}",
    '{"location": "{c}", "temperature": {t}, "unit": "celsius", "weather": "{w}"}', "{c}: {w}, {t}°C",
))  # fmt: skip

TIME = expand_all((
    "[What is|What's|Tell me] the time in {city}[ now| right now|]", "{city} time[ now|]?",
    "What time is it in {city}[ now| right now| today|]?", "Time in {city}[ now| right now|]?",
    "[What is|What's|Tell me|Give me] the [local|current|exact] time [in|for] {city}[ now|]",
    "[Check|Get|Show me|Look up|Find] the time [in|for] {city}[ now| right now|]",
    "[Can you|Could you|Please] [check|tell me|get|look up|find] the time [in|for] {city}[ now|]",
    "[Tell me|Can you say|Say] what time it is in {city}[ now|]", "How late is it in {city}[ now| right now|]?",
    "[Is it|Is it already|Is it still] [morning|evening|night|late|early|noon|day] in {city}[ now|]?",
    "[I want|I would like|I'd like|I need] to know the time in {city}", "What hour is it in {city}?",
    "I [call|phone|write to] a friend in {city}, what time is it there?", "What does the clock say in {city}?",
    "[Will|Would] you [find out|get|tell me|look up] the time [in|for] {city}?", "The time in {city}, please.",
    "[Do you have|Have you got] the time [in|for] {city}?", "I fly to {city} today, what is the time there?",
    "[I am|I live|I stay] in {city}[ now| today|], what is the time[ here|]?", "Which time is it in {city}[ now|]?",
    "[Say|Can you say|Can you tell me|Do you know] how late it is in {city}[ now|]",
    "[I am|I live] in {city} [now|today], what time is it[ here|]?", "Is it [dark|light] in {city}[ now|]?",
))  # fmt: skip
HELD_TIME = expand_all((
    "Could you show me the time in {city}?", "What time is it in {city} at the moment?",
    "Do you know the time in {city}?", "Let me know the time in {city}.", "I am in {city}. What time is it?",
    "Would you check the time for {city}?", "Tell me how late it is in {city}.",
    "Is it day or night in {city}?", "I need the time in {city}.", "Which time do they have in {city}?",
))  # fmt: skip
# Tool results: {t} is the time, {c} the city, {h} hours.
TIME_RESULTS = expand_all((
    '{"[time|local_time|now|clock]": "{t}"}', '{"[city|location|place]": "{c}", "[time|local_time]": "{t}"}',
    '{"time": "{t}", "[timezone|zone|utc_offset]": "[+|-]{h}"}', '{"time": "{t}", "city": "{c}"}',
    "{t}", "{c}: {t}", "It is {t}[.|| now]", "{t} in {c}", "{t} local time", "The time is {t}",
    '{"timezone": "UTC[+|-]{h}", "[time|local_time]": "{t}"}', '{"[utc_offset|offset]": [|-]{h}, "time": "{t}"}',
    '{"[city|place]": "{c}", "[offset|timezone]": [|-]{h}, "[time|now]": "{t}"}',
))  # fmt: skip
HELD_TIME_RESULTS = expand_all((
    '{"current_time": "{t}"}', '{"city": "{c}", "utc_offset": {h}, "time": "{t}"}', "Local time: {t}",
    "In {c} it is {t}",
))  # fmt: skip

# Two cities, {a} and {b}.
TWO_WEATHERS = expand_all((
    "[What is|What's|How is|Tell me|Get|Check|Show me|Look up] the weather in {a} and [in |]{b}[ today| now|]",
    "[Can you|Could you|Please] [check|tell me|get|look up] the weather [in|for] {a} and {b}[ today| now|]",
    "Weather [in|for] {a} and {b}", "[How warm|How cold|How hot] is it in {a} and [in |]{b}[ today| now|]?",
    "Is it [warm|cold|sunny|raining|windy] in {a} and [in |]{b}?", "Compare the weather in {a} and [in |]{b}",
    "Is it [warmer|colder|hotter] in {a} [or|than] in {b}[ today| now|]?", "{a} and {b} weather[ today|]?",
    "What is the weather like in {a} and [in |]{b}?", "What's the weather in {a}, and in {b}?",
    "I [go|travel|fly] to {a} and then to {b}, [what is|how is] the weather there?",
    "[What is|What's|Tell me] the temperature in {a} and [in |]{b}[ today| now|]",
    "I need the weather of both {a} and {b}", "How is the weather [in|for] both {a} and {b}?",
))  # fmt: skip
HELD_TWO_WEATHERS = expand_all((
    "How is the weather in {a} and in {b} at the moment?", "Could you show me the weather in {a} and {b}?",
    "Do you know the weather in {a} and in {b}?", "Is the weather nice in {a} and {b}?",
    "Is {a} warmer than {b}?", "Would you check the weather for {a} and for {b}?",
    "Tell me how the weather is in {a} and {b}.", "Let me know the weather in both {a} and {b}.",
))  # fmt: skip
TWO_TIMES = expand_all((
    "[What is|What's|Tell me|Get|Check|Show me|Look up] the time in {a} and [in |]{b}[ now|]",
    "What time is it in {a} and [in |]{b}[ now| right now|]?", "Time in {a} and {b}",
    "[Can you|Could you|Please] [check|tell me|get|look up] the time [in|for] {a} and {b}[ now|]",
    "Is it later in {a} or in {b}?", "[Tell me|Say] what time it is in {a} and [in |]{b}",
    "How late is it in {a} and [in |]{b}[ now|]?", "I need the time of both {a} and {b}",
    "What's the time in {a}, and in {b}?", "Compare the [local |]time in {a} and [in |]{b}",
    "[What is|Tell me] the [local|current] time in {a} and [in |]{b}",
))  # fmt: skip
HELD_TWO_TIMES = expand_all((
    "What time is it in {a} and in {b} at the moment?", "Could you show me the time in {a} and {b}?",
    "Do you know the time in {a} and in {b}?", "Would you check the time for {a} and for {b}?",
    "Let me know the time in both {a} and {b}.", "Is it earlier in {a} or in {b}?",
))  # fmt: skip
# One city, both tools: {x} and {y} are "weather" and "time" in either order.
BOTH = expand_all((
    "[What is|What's|What are|Tell me|Get|Check|Show me|Look up] the {x} and [the |]{y} in {city}[ now|]",
    "[Can you|Could you|Please] [check|tell me|get|look up] the {x} and [the |]{y} [in|for] {city}[ now|]",
    "{x} and {y} in {city}[ now| please|]", "I need [the |]{x} and [the |]{y} for {city}",
    "I [go|travel|fly] to {city}, what are the {x} and the {y} there?",
    "Both the {x} and the {y} in {city}", "[What is|What's] the {x} in {city}, and the {y}?",
    "[I want|I would like] to know the {x} and the {y} in {city}", "For {city}, get the {x} and the {y}",
))  # fmt: skip
HELD_BOTH = expand_all((
    "Could you show me the {x} and the {y} in {city}?", "Let me know the {x} and the {y} in {city}.",
    "Do you know the {x} and the {y} in {city}?", "Would you check both {x} and {y} for {city}?",
    "I am in {city}. What are the {x} and the {y}?", "What are the {x} and {y} in {city} at the moment?",
))  # fmt: skip
