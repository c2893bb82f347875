#ifdef STEPS_FILE
        @NAME@_get_weights(&memory.state, weights);
        failures += !steps || fwrite(weights, sizeof weights, 1, steps) != 1;
        if (steps && k + 1 == @STEPS@)
            failures += fclose(steps) != 0;
#endif
