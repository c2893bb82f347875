/* cuDNN calls that only run something (no headers here: the arguments do not matter). */
#define EXPORT __attribute__((visibility("default")))
#define NOTHING(f) EXPORT int f(void) { return 0; }
NOTHING(cudnnBatchNormalizationForwardTrainingEx) NOTHING(cudnnBatchNormalizationBackwardEx) NOTHING(cudnnBatchNormalizationForwardInference)
NOTHING(cudnnSpatialTfGridGeneratorForward) NOTHING(cudnnSpatialTfGridGeneratorBackward) NOTHING(cudnnSpatialTfSamplerForward) NOTHING(cudnnSpatialTfSamplerBackward)
NOTHING(cudnnPoolingForward) NOTHING(cudnnRNNForward) NOTHING(cudnnRNNBackwardData_v8) NOTHING(cudnnRNNBackwardWeights_v8)
NOTHING(cudnnSetDropoutDescriptor) NOTHING(cudnnRestoreDropoutDescriptor)
/* what would have to be asked through a real handle: refused, rather than answered wrongly */
extern int dry_missing(const char *, int);
#define REFUSED(f) EXPORT int f(void) { return dry_missing("refused: " #f, 3000); }
REFUSED(cudnnGetRNNTempSpaceSizes) REFUSED(cudnnGetRNNWeightSpaceSize) REFUSED(cudnnGetRNNWeightParams) REFUSED(cudnnDropoutGetStatesSize)
REFUSED(cudnnGetCTCLossWorkspaceSize) REFUSED(cudnnGetCTCLossWorkspaceSize_v8) REFUSED(cudnnCTCLoss) REFUSED(cudnnCTCLoss_v8)
