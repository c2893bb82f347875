/* Steps of @NAME@ beside what PyTorch computed for the same data, written by memplan. Prints each loss; returns 1 where one
   is out of its bounds, or where memory around the state has changed. With WEIGHTS_FILE defined, writes there the weights
   after the last step, and then what infer makes. */
#include "@NAME@.h"
#include <math.h>
#include <stdio.h>

@ARRAYS@

static const float losses[@STEPS@] = {@LOSSES@}, loss_bounds[@STEPS@] = {@LOSS_BOUNDS@};
static const float expected[@CHECKED@] = {@OUTPUT@}, expected_in_step[@STEP_CHECKED@] = {@STEP_OUTPUT@};
static const struct {
    int at;
    float value, bound;
} samples[] = {
    @SAMPLES@
};

static struct {
    unsigned char before[64];
    @NAME@_state state;
    unsigned char after[64];
    @ARENA@
} memory;
static float weights[@UPPER@_WEIGHTS], output[@UPPER@_OUTPUTS], made[@MADE@];

#ifdef TICKS
uint32_t ticks(void); /* 24 bits of a clock */
#else
#define ticks() 0u
#endif
@READ_FLASH@
static int differs(const char *what, int at, float found, float wanted, float bound)
{
    if (fabsf(found - wanted) <= bound)
        return 0;
    printf("%s %d is %.9g, expected %.9g within %.3g\n", what, at, (double)found, (double)wanted, (double)bound);
    return 1;
}

/* The inputs of step k. */
static void take(int k)
{
    @ROLLS@
}

int main(void)
{
    int failures = 0;
    for (int k = 0; k < 64; k++)
        memory.before[k] = memory.after[k] = memory.end[k] = 0xA5;
@IF_UNREAD@    @NAME@_init(&memory.state@GIVEN@);
@OPEN_STEPS@    for (int k = 0; k < @STEPS@; k++) {
        take(k);
        uint32_t before = ticks();
        float loss = @NAME@_step_to(&memory.state, @ARGUMENTS@, made);
        uint32_t spent = (ticks() - before) & 0xFFFFFF;
        if (spent)
            printf("ticks %lu\n", (unsigned long)spent);
        printf("step %d loss %.9g\n", k, (double)loss);
@WRITE_STEP@        failures += differs("loss", k, loss, losses[k], loss_bounds[k]);
    }
    for (int k = 0; k < @STEP_CHECKED@; k++)
        failures += differs("output of the step", k, made[k], expected_in_step[k], @STEP_OUTPUT_BOUND@);
    @NAME@_get_weights(&memory.state, weights);
    for (unsigned k = 0; k < sizeof samples / sizeof *samples; k++)
        failures += differs("weight", samples[k].at, weights[samples[k].at], samples[k].value, samples[k].bound);
    take(@STEPS@ - 1);
    @NAME@_infer(&memory.state, @INFER@, output);
    for (int k = 0; k < @CHECKED@; k++)
        failures += differs("output", k, output[k], expected[k], @OUTPUT_BOUND@);
    take(@STEPS@ - 1);
    failures += differs("evaluated loss", 0, @EVALUATE@, @EVALUATED@, @EVALUATED_BOUND@);
    for (int k = 0; k < 64; k++)
        failures += memory.before[k] != 0xA5 || memory.after[k] != 0xA5 || memory.end[k] != 0xA5;
#ifdef WEIGHTS_FILE
    FILE *file = fopen(WEIGHTS_FILE, "wb");
    if (!file || fwrite(weights, sizeof weights, 1, file) != 1 || fwrite(output, sizeof output, 1, file) != 1)
        failures++;
    if (file)
        fclose(file);
#endif
    printf("%s\n", failures ? "different" : "same");
    return failures ? 1 : 0;
}
