/* A product of matrices: sizes, and a step of each operand in each dimension. */
typedef struct {
    int rows, columns, inner, a_row, a_column, b_row, b_column, bias_row, bias_column;
} product;
