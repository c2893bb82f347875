#ifdef STEPS_FILE
        @NAME@_get_weights(&memory.state, weights);
        if (!steps || fwrite(weights, sizeof weights, 1, steps) != 1 || (k + 1 == sizeof losses / sizeof *losses && fclose(steps)))
            failures++;
#endif
