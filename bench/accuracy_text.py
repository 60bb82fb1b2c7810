"""The fixed text on which `legato.bench.accuracy` measures. A change of it changes every figure."""

TEXT = """\
The ferry to the island left at six in the morning, and by half past five the small harbour \
was already full of people. Most of them carried baskets. A few had bicycles, and one old man \
stood beside a grandfather clock that he had wrapped in two grey blankets and tied with a \
rope. Nobody asked him about it. On that coast it was considered polite to wait until a person \
wished to tell his story, and the old man did not look as though he wished to.

Marta had come to the harbour because of a letter. It had been lying on her kitchen table for \
three weeks, and every evening she had read it again, as if the words might have changed \
during the day. The letter said that her aunt's house was empty now, that the roof needed \
attention before winter, and that the key would be with the neighbour, who was home on most \
days except Thursdays. It was signed by a lawyer whose name she could not read. She had never \
met her aunt. She had not known, until the letter arrived, that there was a house.

"You will want to sit on the left side," said the woman who sold the tickets. "The wind comes \
from the north today. On the right you get wet."

"Is it far?"

"Forty minutes. An hour, if the captain stops to talk to his brother." She tore the ticket in \
half. "He usually stops."

How does a refrigerator keep food cold? The short answer is that it does not make cold at all; \
it moves heat. Inside the walls runs a closed loop of pipe, filled with a fluid that boils at \
a low temperature. When the fluid is allowed to expand, it evaporates, and evaporation takes \
heat from everything around it, just as sweat cools the skin. The gas is then pumped to the \
back of the machine and squeezed until it is hot. There it gives its heat to the air of the \
kitchen, turns into a liquid again, and begins another round. This is why the back of a \
refrigerator feels warm, and why leaving the door open will not cool a room: whatever is taken \
from the air in front is returned to it behind, together with the energy that the motor uses.

The same idea, turned around, can heat a house. A heat pump takes warmth from the outside air, \
even when that air feels cold to us, and carries it indoors. For every unit of electricity it \
uses, it may bring in three or four units of heat. The colder it is outside, the harder it has \
to work, and the smaller the advantage becomes.

To make a simple vegetable soup for four people, you need two onions, three carrots, a stick \
of celery, two potatoes, a litre of water, and salt. Cut the onions into small pieces and cook \
them slowly in a little oil until they are soft and golden; this takes about ten minutes, and \
it should not be hurried. Add the other vegetables, cut into cubes of roughly the same size, \
so that they will be done at the same time. Pour in the water, bring it to the boil, then turn \
the heat down and let the pot simmer for half an hour. Taste it before you add more salt. If \
you like a thicker soup, crush some of the potatoes against the side of the pot with a spoon.

A queue is a list with a rule: things are added at one end and taken from the other. Whoever \
came first is served first. The rule is so familiar from shops and bus stops that we hardly \
notice it, but it is worth noticing, because there are other rules. A hospital does not treat \
patients in the order in which they arrive; it treats the most urgent ones first. A stack of \
plates is emptied from the top, so the plate that was washed last is used first, and the one \
at the bottom may not be touched for years. Programs use all of these rules. When a web server \
has more requests than it can answer, it must decide which of them will wait, how long, and \
when it would be kinder to say no at once than to let someone wait for nothing.

Suppose that a server can handle one hundred requests in a second, and that ninety arrive. It \
seems that there is room to spare. But requests do not arrive evenly. In some seconds there \
are sixty and in others one hundred and twenty, and the extra ones have to wait until a \
quieter moment. The closer the average comes to the limit, the longer these waits become, and \
they do not grow in proportion: at half the capacity hardly anyone waits, at nine tenths the \
typical wait is many times longer, and at the limit itself the queue grows without end. People \
who run such systems learn to be suspicious of a machine that is always busy.

The first maps of the northern coast were drawn by sailors who had no way to measure \
longitude. They knew how far north they were, because the height of the sun at noon told them, \
but how far east or west they could only guess from their speed and the time that had passed. \
A ship that sailed against an unknown current for a week might be off by a hundred kilometres. \
As a result the old maps show the coast correctly from top to bottom and strangely stretched \
from side to side, like a drawing on a sheet of rubber. Only when clocks were built that kept \
good time at sea could a sailor compare the local noon with the noon at home and read his \
position from the difference.

By the time the ferry reached the island, the sun stood high above the hills. Marta had sat on \
the left side and stayed dry. The captain had stopped, as promised, next to a smaller boat, \
and the two brothers had talked about the price of fish, a wedding in September, and a dog \
that had learned to open the door of the church. Now she walked up the road between stone \
walls, with the lawyer's letter in her pocket and the sound of bees on both sides. It was a \
Tuesday. The neighbour would be at home.

The house was smaller than she had imagined and stood a little apart from the others, with its \
back to the wind. Somebody had painted the door blue, a long time ago, and somebody had \
planted a pear tree that was now taller than the roof. She looked for a bell and found none. \
While she was still wondering what to do, the door of the next house opened, and a woman of \
about eighty came out, holding a key in one hand and a loaf of bread in the other.

"You have her walk," the woman said. "I saw you from the window and I thought: that is how she \
came up the road, the first time, with the same face, as if the hill had insulted her." She \
held out the key. "The bread is from this morning. There is no butter. I did not know if you \
would come today or next year."

"Did you know her well?" asked Marta.

The old woman considered the question. Down in the harbour the ferry sounded its horn, three \
times, and turned towards the mainland. "For thirty years we drank coffee together every \
afternoon," she said at last. "I could not tell you where she was born, or whether she had \
ever been married. But I knew when she was sad, and she knew when I was. Is that well? I have \
never been sure. Come inside. I will show you how the stove works. It has its own opinions."
"""
