/* Learns gestures on an Arduino, from samples that come over the serial port: a step of training for each.

   The board sends '?' when it is ready. The host answers with GESTURES_SAMPLE readings of eight bits, then the label of
   the gesture, or 255 for a question. After a label the board trains and prints the loss; after a question it prints
   the class that it takes the sample for. gestures.c is a file of C: memplan export wrote it. */
#include "gestures.h"

static const size_t READINGS = 24; /* 8 moments of 3 axes */
static gestures_state state;
static int8_t sample[READINGS + 1];

void setup()
{
    Serial.begin(115200);
    gestures_init(&state);
}

static int recognized(const int8_t *x)
{
    float scores[GESTURES_OUTPUTS];
    int best = 0;
    gestures_infer(&state, x, scores);
    for (int k = 1; k < GESTURES_OUTPUTS; k++)
        if (scores[k] > scores[best])
            best = k;
    return best;
}

void loop()
{
    Serial.write('?');
    if (Serial.readBytes((char *)sample, sizeof sample) != sizeof sample)
        return; /* nothing came within a second: ask again */
    int32_t label = (uint8_t)sample[READINGS];
    if (label == 255) {
        Serial.print("gesture ");
        Serial.println(recognized(sample));
        return;
    }
    Serial.print("loss ");
    Serial.println(gestures_step(&state, sample, &label), 6); /* "nan" for a label that does not exist */
}
