/* Learns gestures under Zephyr: main trains by a step for each sample. */
#include <zephyr/kernel.h>
#include <zephyr/sys/printk.h>

#include "gestures.h"
#include "samples.h"

#define PERIOD_MS 10

static gestures_state state;

/* gestures.c calls it after each kernel: see CMakeLists.txt. */
void yield_between_kernels(void)
{
    k_yield();
}

/* In place of a driver: samples that were recorded. With a sensor, sensor_sample_fetch and sensor_channel_get. */
static const struct sample *sensed(int at)
{
    k_msleep(PERIOD_MS);
    return &recorded[at];
}

static int recognized(void)
{
    int right = 0;
    for (int k = 0; k < TESTED; k++) {
        float scores[GESTURES_OUTPUTS];
        int best = 0;
        gestures_infer(&state, tested[k].readings, scores);
        for (int at = 1; at < GESTURES_OUTPUTS; at++)
            if (scores[at] > scores[best])
                best = at;
        right += best == tested[k].label;
    }
    return right;
}

int main(void)
{
    gestures_init(&state);
    printk("recognized before training: %d of %d\n", recognized(), TESTED);
    for (int k = 0; k < CONFIG_GESTURES_STEPS; k++) {
        const struct sample *sample = sensed(k);
        printk("loss %f\n", (double)gestures_step(&state, sample->readings, &sample->label));
    }
    printk("recognized after training: %d of %d\n", recognized(), TESTED);
    return 0;
}
