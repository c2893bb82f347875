/* Sizes of two loops over the elements of a result and three over those that each is made of, and the steps in the operand. */
typedef struct {
    int size[5], step[5];
} reduction;
